// Python bindings: release the GIL, and call. Arrays are addresses, which dos/kernels/update.py and
// dos/state/disk/ have checked: passing thousands of tensors would cost more than small updates.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "adam.h"
#include "disk.h"

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

static_assert(sizeof(dos::AdamRun) == 14 * 8, "dos/kernels/update.py writes 14 words");

}  // namespace

NB_MODULE(_adam, module) {
  module.def("instruction_sets", instruction_sets);

  // runs: the address of `count` AdamRun; scalars: AdamScalars in order, in double precision.
  module.def(
      "adam_update",
      [](uintptr_t runs, int64_t count, const std::vector<std::array<double, 13>>& scalars, int threads,
         const Name& isa_name) {
        std::vector<dos::AdamScalars> rounded;
        for (const auto& s : scalars) {
          const auto f = [&](int i) { return static_cast<float>(s[i]); };
          rounded.push_back({f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), s[10] != 0, s[11] != 0,
                             static_cast<uint32_t>(s[12])});
        }
        const dos::Isa isa = find_isa(isa_name);
        const nb::gil_scoped_release release;
        dos::adam_update(at<const dos::AdamRun>(runs), count, rounded.data(), threads, isa);
      },
      "runs"_a, "count"_a, "scalars"_a, "threads"_a, "isa"_a.none());

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
