// Python bindings: release the GIL, and call. Arrays are addresses, which dos/kernels/update.py and
// dos/state/disk/ have checked: passing thousands of tensors would cost more than small updates.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "adam.h"
#include "arrivals.h"
#include "disk.h"
#include "order.h"
#include "runtime.h"
#include "team.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Name = std::optional<std::string>;

constexpr std::array<std::pair<const char*, dos::Isa>, 3> kIsas = {
    {{"avx512", dos::Isa::avx512}, {"avx2", dos::Isa::avx2}, {"portable", dos::Isa::portable}}};

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const auto& [name, isa] : kIsas) {
    if (dos::supported(isa)) names.emplace_back(name);
  }
  return names;
}

dos::Isa find_isa(const Name& wanted) {
  std::string usable;
  for (const auto& [name, isa] : kIsas) {
    if (!dos::supported(isa)) continue;
    if (!wanted || *wanted == name) return isa;
    usable += std::string(usable.empty() ? "" : ", ") + name;
  }
  throw nb::value_error(("instruction set '" + *wanted + "' is not usable here; usable: " + usable).c_str());
}

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

using Scalars = std::vector<std::array<double, 13>>;

std::vector<dos::AdamScalars> rounded(const Scalars& scalars) {
  std::vector<dos::AdamScalars> found;
  for (const auto& s : scalars) {
    const auto f = [&](int i) { return static_cast<float>(s[i]); };
    found.push_back({f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), s[10] != 0, s[11] != 0,
                     static_cast<uint32_t>(s[12])});
  }
  return found;
}

static_assert(sizeof(dos::AdamRun) == 14 * 8, "dos/kernels/update.py writes 14 words");

}  // namespace

NB_MODULE(_adam, module) {
  // A forked child ends without the frames of its parent's threads, which refer to an Order: that is no leak of ours.
  nb::set_leak_warnings(false);

  module.def("instruction_sets", instruction_sets);

  // runs: the address of `count` AdamRun; scalars: AdamScalars in order, in double precision.
  module.def(
      "adam_update",
      [](uintptr_t runs, int64_t count, const Scalars& scalars, int threads, const Name& isa_name) {
        const auto steps = rounded(scalars);
        const dos::Isa isa = find_isa(isa_name);
        const nb::gil_scoped_release release;
        dos::adam_update(at<const dos::AdamRun>(runs), count, steps.data(), threads, isa);
      },
      "runs"_a, "count"_a, "scalars"_a, "threads"_a, "isa"_a.none());

  nb::class_<dos::Order>(module, "Order")
      .def(nb::init<>())
      .def(
          "serve",
          [](dos::Order& order) {
            const nb::gil_scoped_release release;
            dos::keep_team_awake();
            order.serve();
          })
      // These release the lock of Python only where they wait: to get it back may take the thread milliseconds.
      .def(
          "enter",
          [](dos::Order& order, int64_t place) {
            if (order.reached(place)) return order.enter(place);
            const nb::gil_scoped_release release;
            order.enter(place);
          },
          "place"_a)
      .def(
          "leave",
          [](dos::Order& order, int64_t place) {
            if (order.reached(place)) return order.leave(place);
            const nb::gil_scoped_release release;
            order.leave(place);
          },
          "place"_a)
      .def("await_begin", &dos::Order::await_begin, "seconds"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("await_end", &dos::Order::await_end, "place"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("stop", &dos::Order::stop)
      .def("close", &dos::Order::close)
      // Returns the start and the end, by time.perf_counter; None if it was stopped before.
      .def(
          "adam_update",
          [](dos::Order& order, int64_t place, uintptr_t runs, int64_t count, const Scalars& scalars, int threads,
             const Name& isa_name) -> std::optional<std::tuple<double, double>> {
            const auto steps = rounded(scalars);
            const dos::Isa isa = find_isa(isa_name);
            const auto update = [&] {
              dos::adam_update(at<const dos::AdamRun>(runs), count, steps.data(), threads, isa);
            };
            const nb::gil_scoped_release release;
            dos::Order::Times times;
            if (!order.run(place, update, &times)) return std::nullopt;
            return std::tuple(times.start, times.end);
          },
          "place"_a, "runs"_a, "count"_a, "scalars"_a, "threads"_a, "isa"_a.none());

  // query: the address of the function, or 0. Only `take` and `wait` wait, and only these release the lock of Python.
  nb::class_<dos::Arrivals>(module, "Arrivals")
      .def(
          "__init__",
          [](dos::Arrivals* made, uintptr_t query) {
            new (made) dos::Arrivals(reinterpret_cast<dos::Arrivals::Query>(query));
          },
          "query"_a)
      .def("give", &dos::Arrivals::give, "number"_a, "rank"_a, "events"_a, "untold"_a)
      .def("tell", &dos::Arrivals::tell, "number"_a, "events"_a)
      .def("take", &dos::Arrivals::take, nb::call_guard<nb::gil_scoped_release>())
      .def("end", &dos::Arrivals::end)
      .def("close", &dos::Arrivals::close)
      .def("fail", &dos::Arrivals::fail)
      .def("wait", &dos::Arrivals::wait, "seconds"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("waiting", &dos::Arrivals::waiting);

  nb::class_<dos::Runtime::Kernel>(module, "Kernel")
      .def(
          "__init__",
          [](dos::Runtime::Kernel* made, uintptr_t function, unsigned blocks, unsigned threads, unsigned shared,
             const std::vector<uint64_t>& arguments, const std::array<uintptr_t, 3>& answer) {
            new (made) dos::Runtime::Kernel{function, blocks, threads, shared, arguments, answer};
          },
          "function"_a, "blocks"_a, "threads"_a, "shared"_a, "arguments"_a, "answer"_a);

  // The addresses of the functions. `queue` returns the error, and `moved` as it is then.
  nb::class_<dos::Runtime>(module, "Runtime")
      .def(
          "__init__",
          [](dos::Runtime* made, uintptr_t wait, uintptr_t record, uintptr_t copy, uintptr_t sleep, uintptr_t launch,
             size_t most) {
            new (made) dos::Runtime(reinterpret_cast<dos::Runtime::Wait>(wait),
                                    reinterpret_cast<dos::Runtime::Record>(record),
                                    reinterpret_cast<dos::Runtime::Copy>(copy),
                                    reinterpret_cast<dos::Runtime::Sleep>(sleep),
                                    reinterpret_cast<dos::Runtime::Launch>(launch), most);
          },
          "wait"_a, "record"_a, "copy"_a, "sleep"_a, "launch"_a, "most"_a)
      // With the lock of Python where there is little to queue: to get it back may take longer.
      .def(
          "queue",
          [](const dos::Runtime& runtime, uintptr_t stream, const std::vector<uintptr_t>& waits, uintptr_t start,
             const std::vector<std::array<uintptr_t, 3>>& copies, int kind, uintptr_t end, int64_t moved,
             const dos::Runtime::Kernel* kernel) {
            const dos::Runtime::Job job{stream, waits, start, end, copies, kind, kernel};
            const auto queue = [&] { return std::pair(runtime.queue(job, &moved), moved); };
            if (runtime.pieces(job) <= 4) return queue();
            const nb::gil_scoped_release release;
            return queue();
          },
          "stream"_a, "waits"_a, "start"_a, "copies"_a, "kind"_a, "end"_a, "moved"_a,
          "kernel"_a.none() = nb::none());

  // The type is an index of dos::DType.
  module.def(
      "sum_of_squares",
      [](int64_t n, uintptr_t src, int type, int threads, const Name& isa_name) {
        const dos::Isa isa = find_isa(isa_name);
        const nb::gil_scoped_release release;
        return dos::sum_of_squares(n, at<void>(src), static_cast<dos::DType>(type), threads, isa);
      },
      "n"_a, "src"_a, "src_type"_a, "threads"_a, "isa"_a.none());

  // requests: file descriptor, offset, address, bytes. Returns their checksums, and Failure.
  module.def(
      "transfer",
      [](bool write, const std::vector<std::array<int64_t, 4>>& requests, int threads) {
        std::vector<dos::Request> all;
        for (const auto& r : requests) all.push_back({static_cast<int>(r[0]), r[1], at<std::byte>(r[2]), r[3]});
        std::vector<uint64_t> checksums(all.size());
        dos::Failure failure;
        {
          const nb::gil_scoped_release release;
          failure = dos::transfer(write, all.data(), all.size(), threads, checksums.data());
        }
        return std::tuple(checksums, failure.request, failure.done, failure.error);
      },
      "write"_a, "requests"_a, "threads"_a);

  module.def("direct_alignment", dos::direct_alignment, "fd"_a);
}
