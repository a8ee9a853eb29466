// Serial kernels over a range, one table per instruction set: kernels.cpp is compiled once for each.
#pragma once

#include "adam.h"

namespace dos {

constexpr int64_t kSumBlock = 4096;

struct Kernels {
  void (*adam)(const AdamArrays& arrays, const AdamScalars& scalars, int64_t begin, int64_t end);
  double (*sum_of_squares)(const void* src, DType src_type, int64_t begin, int64_t end);
};

extern const Kernels kernels_portable, kernels_avx2, kernels_avx512;

}  // namespace dos
