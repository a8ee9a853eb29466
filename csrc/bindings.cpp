// Python bindings: check the arrays, release the GIL, call. Nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "adam.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Input = nb::ndarray<nb::ro>;
using Output = nb::ndarray<>;
using MaybeOutput = std::optional<Output>;

constexpr std::array<std::pair<const char*, dos::Isa>, 3> kIsas = {
    {{"avx512", dos::Isa::avx512}, {"avx2", dos::Isa::avx2}, {"portable", dos::Isa::portable}}};

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const auto& [name, isa] : kIsas) {
    if (dos::supported(isa)) names.emplace_back(name);
  }
  return names;
}

dos::Isa find_isa(const std::optional<std::string>& wanted) {
  std::string usable;
  for (const auto& [name, isa] : kIsas) {
    if (!dos::supported(isa)) continue;
    if (!wanted || *wanted == name) return isa;
    usable += std::string(usable.empty() ? "" : ", ") + name;
  }
  throw nb::value_error(("instruction set '" + *wanted + "' is not usable here; usable: " + usable).c_str());
}

std::string describe(nb::dlpack::dtype type) {
  const auto code = static_cast<nb::dlpack::dtype_code>(type.code);
  const std::string bits = std::to_string(type.bits);
  switch (code) {
    case nb::dlpack::dtype_code::Float: return "float" + bits;
    case nb::dlpack::dtype_code::Bfloat: return "bfloat" + bits;
    case nb::dlpack::dtype_code::Int: return "int" + bits;
    case nb::dlpack::dtype_code::UInt: return "uint" + bits;
    default: return "dtype code " + std::to_string(type.code) + " of " + bits + " bits";
  }
}

template <class Array>
dos::DType dtype(const char* name, const Array& array, bool allow_float32, bool allow_16bit) {
  const nb::dlpack::dtype type = array.dtype();
  const auto is = [&](nb::dlpack::dtype_code code, int bits) {
    return type.code == static_cast<uint8_t>(code) && type.bits == bits && type.lanes == 1;
  };
  if (allow_float32 && is(nb::dlpack::dtype_code::Float, 32)) return dos::DType::float32;
  if (allow_16bit && is(nb::dlpack::dtype_code::Bfloat, 16)) return dos::DType::bfloat16;
  if (allow_16bit && is(nb::dlpack::dtype_code::Float, 16)) return dos::DType::float16;
  const char* expected = !allow_16bit    ? "float32"
                         : allow_float32 ? "float32, bfloat16 or float16"
                                         : "bfloat16 or float16";
  throw nb::type_error((std::string(name) + ": expected " + expected + ", found " + describe(type)).c_str());
}

// One dimension, dense, on the CPU, as long as `length` unless that is negative.
template <class Array>
auto* data(const char* name, const Array& array, int64_t length) {
  const auto refuse = [&](const std::string& what) {
    throw nb::value_error((std::string(name) + ": " + what).c_str());
  };
  if (array.device_type() != nb::device::cpu::value && array.device_type() != nb::device::cuda_host::value) {
    refuse("expected memory of the CPU, found DLPack device type " + std::to_string(array.device_type()));
  }
  if (array.ndim() != 1) refuse("expected 1 dimension, found " + std::to_string(array.ndim()));
  const auto size = static_cast<int64_t>(array.shape(0));
  if (length >= 0 && size != length) {
    refuse("expected " + std::to_string(length) + " elements, found " + std::to_string(size));
  }
  if (size > 1 && array.stride(0) != 1) {
    refuse("expected a contiguous array, found stride " + std::to_string(array.stride(0)));
  }
  return array.data();
}

float* state(const char* name, const Output& array, int64_t length) {
  dtype(name, array, true, false);
  return static_cast<float*>(data(name, array, length));
}

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

int check_threads(int threads) {
  if (threads < 1) throw nb::value_error(("threads: expected at least 1, found " + std::to_string(threads)).c_str());
  return threads;
}

dos::AdamArrays arrays_of(const Input& grad, const Output& param, const Output& exp_avg, const Output& exp_avg_sq,
                          const MaybeOutput& out) {
  const auto n = static_cast<int64_t>(param.size());
  dos::AdamArrays arrays{};
  arrays.param_type = dtype("param", param, true, true);
  arrays.param = data("param", param, -1);
  arrays.grad_type = dtype("grad", grad, true, true);
  arrays.grad = data("grad", grad, n);
  arrays.exp_avg = state("exp_avg", exp_avg, n);
  arrays.exp_avg_sq = state("exp_avg_sq", exp_avg_sq, n);
  if (out) {
    arrays.out_type = dtype("low_precision_out", *out, false, true);
    arrays.out = data("low_precision_out", *out, n);
    if (arrays.param_type != dos::DType::float32) {
      throw nb::type_error("low_precision_out: expected only beside a float32 param");
    }
  }
  return arrays;
}

}  // namespace

NB_MODULE(_adam, module) {
  module.def("instruction_sets", instruction_sets);

  // By address: a step may make a thousand calls, and exchanging six arrays would cost each more than a small update.
  // dos/update.py, the only caller, has checked the arrays. Addresses are in the order of AdamArrays,
  // 0 is null; types are indices of dos::DType, of grad, param and out.
  module.def(
      "adam_update_at",
      [](int64_t n, const std::array<uintptr_t, 6>& a, const std::array<int, 3>& types, const std::array<double, 10>& s,
         bool use_l2, int threads, const std::optional<std::string>& isa_name) {
        const auto f = [&](int i) { return static_cast<float>(s[i]); };
        const dos::AdamScalars scalars{f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), use_l2};
        const auto type = [&](int i) { return static_cast<dos::DType>(types[i]); };
        const dos::AdamArrays arrays{at<const void>(a[0]), type(0),         at<void>(a[1]), type(1), at<float>(a[2]),
                                     at<float>(a[3]),      at<float>(a[4]), at<void>(a[5]), type(2)};
        const dos::Isa isa = find_isa(isa_name);
        check_threads(threads);
        const nb::gil_scoped_release release;
        dos::adam_update(n, arrays, scalars, threads, isa);
      },
      "n"_a, "addresses"_a, "types"_a, "scalars"_a, "use_l2"_a, "threads"_a, "isa"_a.none());

  module.def(
      "accumulate",
      [](const Input& src, const Output& dst, bool overwrite, int threads, const std::optional<std::string>& isa_name) {
        const auto n = static_cast<int64_t>(dst.size());
        float* to = state("dst", dst, -1);
        const dos::DType type = dtype("src", src, true, true);
        const void* from = data("src", src, n);
        const dos::Isa isa = find_isa(isa_name);
        check_threads(threads);
        const nb::gil_scoped_release release;
        dos::accumulate(n, from, type, to, overwrite, threads, isa);
      },
      "src"_a, "dst"_a, "overwrite"_a, "threads"_a, "isa"_a.none());

  module.def(
      "sum_of_squares",
      [](const Input& src, int threads, const std::optional<std::string>& isa_name) {
        const dos::DType type = dtype("src", src, true, true);
        const void* from = data("src", src, -1);
        const dos::Isa isa = find_isa(isa_name);
        check_threads(threads);
        const nb::gil_scoped_release release;
        return dos::sum_of_squares(static_cast<int64_t>(src.size()), from, type, threads, isa);
      },
      "src"_a, "threads"_a, "isa"_a.none());

  module.def(
      "stream_adam",
      [](const Input& grad, const Output& param, const Output& exp_avg, const Output& exp_avg_sq,
         const MaybeOutput& out, int threads) {
        const auto arrays = arrays_of(grad, param, exp_avg, exp_avg_sq, out);
        const dos::Isa isa = find_isa(std::nullopt);
        check_threads(threads);
        const nb::gil_scoped_release release;
        dos::stream_adam(static_cast<int64_t>(param.size()), arrays, threads, isa);
      },
      "grad"_a, "param"_a, "exp_avg"_a, "exp_avg_sq"_a, "out"_a.none(), "threads"_a);

  module.def(
      "stream_accumulate",
      [](const Input& src, const Output& dst, int threads) {
        const auto n = static_cast<int64_t>(dst.size());
        float* to = state("dst", dst, -1);
        const dos::DType type = dtype("src", src, true, true);
        const void* from = data("src", src, n);
        const dos::Isa isa = find_isa(std::nullopt);
        check_threads(threads);
        const nb::gil_scoped_release release;
        dos::stream_accumulate(n, from, type, to, threads, isa);
      },
      "src"_a, "dst"_a, "threads"_a);
}
