// Chooses the instruction set and shares the range among threads.
#include "adam.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include <omp.h>

#if defined(DOS_X86)
#include <xmmintrin.h>
#endif

#include "kernels.h"
#include "team.h"

namespace dos {
namespace {

// Sets rounding to nearest and keeps denormals, even if torch.set_flush_denormal or another library chose otherwise.
class DefaultFloatEnvironment {
 public:
#if defined(DOS_X86)
  DefaultFloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~DefaultFloatEnvironment() { _mm_setcsr(saved_); }

 private:
  unsigned int saved_;
#elif defined(__aarch64__)
  DefaultFloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~DefaultFloatEnvironment() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

// Below this many elements a thread costs more to wake than it saves.
constexpr int64_t kMinPerThread = 16384;

// Threads take so many elements at a time, so that one whose core is busy with other work delays the rest by no more.
constexpr int64_t kTaken = 1 << 16;

// Calls f(begin, end) on contiguous shares whose boundaries are multiples of `grain`, a divisor of kTaken.
template <class F>
void parallel(int64_t n, int64_t grain, int threads, const F& f) {
  threads = static_cast<int>(std::clamp<int64_t>(n / kMinPerThread, 1, threads));
  // Few elements are divided equally.
  const int64_t each = (n + threads - 1) / threads;
  const int64_t taken = std::min(kTaken, (each + grain - 1) / grain * grain);
  std::atomic<int64_t> next{0};
  const auto share = [&](int64_t, int64_t) {
    const DefaultFloatEnvironment environment;
    for (int64_t begin; (begin = next.fetch_add(taken, std::memory_order_relaxed)) < n;) {
      f(begin, std::min(n, begin + taken));
    }
  };
  if (threads == 1) return share(0, 1);
  if (on_main_thread()) {
#pragma omp parallel num_threads(threads)
    share(omp_get_thread_num(), omp_get_num_threads());
    return;
  }
  const auto call = [](const void* work, int index, int count) {
    (*static_cast<const decltype(share)*>(work))(index, count);
  };
  run_on_team(threads, call, &share);
}

constexpr int64_t kGrain = kScaled;  // elements: whole blocks of codes, and cache lines in every dtype

// Calls f(run, begin, end) on shares of all runs laid end to end, each run padded to whole grains.
template <class F>
void parallel_over(const AdamRun* runs, int64_t count, int threads, const F& f) {
  const auto length = [](const AdamRun& run) {
    return run.arrays.grad ? (run.numel + kGrain - 1) / kGrain * kGrain : 0;
  };
  std::vector<int64_t> ends;  // of the runs
  ends.reserve(count);
  for (int64_t i = 0; i < count; ++i) ends.push_back((i ? ends.back() : 0) + length(runs[i]));
  parallel(count ? ends.back() : 0, kGrain, threads, [&](int64_t begin, int64_t end) {
    const int64_t first = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    int64_t start = first ? ends[first - 1] : 0;
    for (const AdamRun* run = runs + first; start < end; start += length(*run++)) {
      const int64_t from = std::max<int64_t>(begin - start, 0), to = std::min(end - start, run->numel);
      if (run->arrays.grad && from < to) f(*run, from, to);
    }
  });
}

const Kernels& kernels(Isa isa) {
#if defined(DOS_X86)
  if (isa == Isa::avx512) return kernels_avx512;
  if (isa == Isa::avx2) return kernels_avx2;
#endif
  return kernels_portable;
}

}  // namespace

bool supported(Isa isa) {
#if defined(DOS_X86)
  if (isa == Isa::avx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
  }
  if (isa == Isa::avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return isa == Isa::portable;
}

void adam_update(const AdamRun* runs, int64_t count, const AdamScalars* scalars, int threads, Isa isa) {
  const auto kernel = kernels(isa).adam;
  parallel_over(runs, count, threads, [&](const AdamRun& run, int64_t begin, int64_t end) {
    kernel(run.arrays, scalars[run.step], begin, end);
  });
}

double sum_of_squares(int64_t n, const void* src, DType src_type, int threads, Isa isa) {
  const auto kernel = kernels(isa).sum_of_squares;
  std::vector<double> sums((n + kSumBlock - 1) / kSumBlock);
  parallel(n, kSumBlock, threads, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block += kSumBlock) {
      sums[block / kSumBlock] = kernel(src, src_type, block, std::min(end, block + kSumBlock));
    }
  });
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

}  // namespace dos
