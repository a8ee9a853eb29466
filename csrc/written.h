// Parameters to which user code has written, and their masters; see adam.h.
#pragma once

#include "formats.h"
#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

namespace dos {
namespace {

// Returns 0 if the master, rounded, is the parameter.
template <class Out>
uint32_t difference(float master, typename Out::Stored parameter) {
  const auto rounded = Out::store(canonical(master));
  if constexpr (__is_same(Out, Float32)) {
    return bits_of(rounded) ^ bits_of(parameter);
  } else {
    return static_cast<uint32_t>(rounded ^ parameter);
  }
}

// Returns whether any of these masters may be another than its parameter, once rounded. Each update asks, and most often
// none is: what little is wrong (of ties, and of NaN) costs time alone.
template <class Out>
bool any_other(const float* __restrict master, const typename Out::Stored* __restrict parameter, int64_t begin,
               int64_t end) {
  uint32_t other = 0;
#if defined(__AVX512BW__)
  if constexpr (!__is_same(Out, Float32)) {
    __m512i found = _mm512_setzero_si512();
    for (; begin + 16 <= end; begin += 16) {
      const __m512 values = _mm512_loadu_ps(master + begin);
      const __m256i stored = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(parameter + begin));
      if constexpr (__is_same(Out, Float16)) {
        const __m256i rounded = _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        found = _mm512_or_si512(found, _mm512_castsi256_si512(_mm256_xor_si256(rounded, stored)));
      } else {
        // The distance from the parameter, in units of the lower half, is less than half a unit of the upper one.
        const __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32(stored), 16);
        const __m512i distance = _mm512_sub_epi32(_mm512_castps_si512(values), upper);
        found = _mm512_or_si512(found, _mm512_add_epi32(distance, _mm512_set1_epi32(0x8000)));
      }
    }
    if constexpr (__is_same(Out, Float16)) {
      const __m256i half = _mm512_castsi512_si256(found);
      other |= !_mm256_testz_si256(half, half);
    } else {
      other |= _mm512_test_epi32_mask(found, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u)));
    }
  }
#endif
#pragma omp simd reduction(| : other)
  for (int64_t i = begin; i < end; ++i) other |= difference<Out>(master[i], parameter[i]);
  return other != 0;
}

template <class Out>
void take_written(float* __restrict master, const typename Out::Stored* __restrict parameter, int64_t begin,
                  int64_t end) {
  if (__builtin_expect(!any_other<Out>(master, parameter, begin, end), 1)) return;
  for (int64_t i = begin; i < end; ++i) {
    if (difference<Out>(master[i], parameter[i])) master[i] = Out::taken(master[i], parameter[i]);
  }
}

}  // namespace
}  // namespace dos
