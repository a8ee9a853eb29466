// Queues the jobs of a device by its runtime's functions, each job by one call, without Python between the runtime's.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace dos {

class Runtime {
 public:
  // Those of CUDA; HIP's are the same. They return 0, or an error.
  using Wait = int (*)(void* stream, void* event, unsigned flags);
  using Record = int (*)(void* event, void* stream);
  using Copy = int (*)(void* to, const void* from, size_t nbytes, int kind, void* stream);
  // PyTorch's: queues a kernel on its current stream that takes so many cycles.
  using Sleep = void (*)(int64_t cycles);
  // The driver's: the extents of grid and block, bytes of shared memory, and the address of each argument.
  using Launch = int (*)(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared,
                         void* stream, void** arguments, void** extra);

  struct Kernel {
    uintptr_t function;
    unsigned blocks, threads, shared;
    std::vector<uint64_t> arguments;  // each in the low bytes of a word; more than the kernel has do no harm
    std::array<uintptr_t, 3> answer;  // a copy behind it: to, from, bytes; 0 bytes: none
  };

  struct Job {
    uintptr_t stream;
    std::vector<uintptr_t> waits;  // events
    uintptr_t start, end;          // events that are recorded before the copies and behind them; 0: none
    std::vector<std::array<uintptr_t, 3>> copies;  // to, from, bytes
    int kind;                                      // of the copies, as the runtime knows it
    const Kernel* kernel;                          // behind the copies; null: none
  };

  // launch: null where no job has a kernel. most: bytes of a piece of a copy.
  Runtime(Wait wait, Record record, Copy copy, Sleep sleep, Launch launch, size_t most)
      : wait_(wait), record_(record), copy_(copy), sleep_(sleep), launch_(launch), most_(most) {}

  // How many copies the runtime will make.
  size_t pieces(const Job& job) const {
    size_t found = 0;
    for (const auto& copy : job.copies) found += (copy[2] + most_ - 1) / most_;
    return found;
  }

  // Returns the first error, behind which nothing is queued, or 0.
  // moved: bytes since the last kernel that lets other streams copy between two pieces; negative: there are none.
  int queue(const Job& job, int64_t* moved) const {
    const auto at = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
    int error = 0;
    for (const uintptr_t event : job.waits) {
      if ((error = wait_(at(job.stream), at(event), 0))) return error;
    }
    if (job.start && (error = record_(at(job.start), at(job.stream)))) return error;
    for (const auto& [to, from, nbytes] : job.copies) {
      for (size_t first = 0; first < nbytes; first += most_) {
        const size_t piece = std::min(most_, nbytes - first);
        if (*moved >= 0 && (*moved += piece) > static_cast<int64_t>(most_)) {
          *moved = piece;
          sleep_(0);
        }
        if ((error = copy_(at(to + first), at(from + first), piece, job.kind, at(job.stream)))) return error;
      }
    }
    if (job.kernel && (error = launch(*job.kernel, job))) return error;
    return job.end ? record_(at(job.end), at(job.stream)) : 0;
  }

 private:
  int launch(const Kernel& kernel, const Job& job) const {
    const auto at = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
    std::vector<void*> arguments;
    for (const uint64_t& word : kernel.arguments) arguments.push_back(const_cast<uint64_t*>(&word));
    const int error = launch_(at(kernel.function), kernel.blocks, 1, 1, kernel.threads, 1, 1, kernel.shared,
                              at(job.stream), arguments.data(), nullptr);
    const auto& [to, from, nbytes] = kernel.answer;
    return error || !nbytes ? error : copy_(at(to), at(from), nbytes, job.kind, at(job.stream));
  }

  const Wait wait_;
  const Record record_;
  const Copy copy_;
  const Sleep sleep_;
  const Launch launch_;
  const size_t most_;
};

}  // namespace dos
