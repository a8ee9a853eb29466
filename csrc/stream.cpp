// What memory alone allows: the traffic of the kernels with one exclusive-or per element.
#include "kernels.h"

#define DOS_CONCAT_(a, b) a##b
#define DOS_CONCAT(a, b) DOS_CONCAT_(a, b)

namespace dos {
namespace {

template <class Grad, bool kOut>
void adam(const AdamArrays& arrays, int64_t begin, int64_t end) {
  const auto* __restrict grad = static_cast<const Grad*>(arrays.grad);
  auto* __restrict param = static_cast<uint32_t*>(arrays.param);
  auto* __restrict exp_avg = static_cast<uint32_t*>(arrays.exp_avg);
  auto* __restrict exp_avg_sq = static_cast<uint32_t*>(arrays.exp_avg_sq);
  auto* __restrict out = static_cast<uint16_t*>(arrays.out);
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t g = grad[i];
    const uint32_t p = param[i] ^ g;
    param[i] = p;
    exp_avg[i] ^= g;
    exp_avg_sq[i] ^= g;
    if constexpr (kOut) out[i] = static_cast<uint16_t>(p);
  }
}

// With a split master: 26 bytes with a 16-bit gradient and float moments.
template <class Grad, class Moment>
void adam_split(const AdamArrays& arrays, int64_t begin, int64_t end) {
  const auto* __restrict grad = static_cast<const Grad*>(arrays.grad);
  auto* __restrict param = static_cast<uint16_t*>(arrays.param);
  auto* __restrict rest = arrays.rest;
  auto* __restrict exp_avg = static_cast<Moment*>(arrays.exp_avg);
  auto* __restrict exp_avg_sq = static_cast<Moment*>(arrays.exp_avg_sq);
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t g = grad[i];
    param[i] ^= static_cast<uint16_t>(g);
    rest[i] ^= static_cast<uint16_t>(g);
    exp_avg[i] ^= static_cast<Moment>(g);
    exp_avg_sq[i] ^= static_cast<Moment>(g);
  }
}

template <class Src>
void accumulate(const void* src_, float* dst_, int64_t begin, int64_t end) {
  const auto* __restrict src = static_cast<const Src*>(src_);
  auto* __restrict dst = reinterpret_cast<uint32_t*>(dst_);
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) dst[i] ^= src[i];
}

void adam_any(const AdamArrays& arrays, int64_t begin, int64_t end) {
  if (arrays.rest) {
    const bool wide = arrays.grad_type == DType::float32;
    (arrays.exp_avg_scale ? (wide ? adam_split<uint32_t, uint8_t> : adam_split<uint16_t, uint8_t>)
                          : (wide ? adam_split<uint32_t, uint32_t> : adam_split<uint16_t, uint32_t>))(arrays, begin, end);
  } else if (arrays.grad_type == DType::float32) {
    (arrays.out ? adam<uint32_t, true> : adam<uint32_t, false>)(arrays, begin, end);
  } else {
    (arrays.out ? adam<uint16_t, true> : adam<uint16_t, false>)(arrays, begin, end);
  }
}

void accumulate_any(const void* src, DType src_type, float* dst, int64_t begin, int64_t end) {
  (src_type == DType::float32 ? accumulate<uint32_t> : accumulate<uint16_t>)(src, dst, begin, end);
}

}  // namespace

extern const StreamKernels DOS_CONCAT(stream_, DOS_ISA);
const StreamKernels DOS_CONCAT(stream_, DOS_ISA) = {adam_any, accumulate_any};

}  // namespace dos
