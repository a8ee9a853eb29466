// Parameters to which user code has written, and their masters; see adam.h.
#pragma once

#include "formats.h"
#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

namespace dos {
namespace {

// How many elements are compared before they are updated: few enough to stay in the innermost cache meanwhile.
constexpr int64_t kChecked = 512;

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

#if defined(__AVX512BW__)
// Returns the upper halves of what is rounded to nearest, away from zero where masters are never: at ties.
inline __m512i rounded_halves(BFloat16, __m512 a, __m512 b) {
  static constexpr uint16_t kUpper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                          33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i x = _mm512_add_epi32(_mm512_castps_si512(a), half), y = _mm512_add_epi32(_mm512_castps_si512(b), half);
  return _mm512_permutex2var_epi16(x, _mm512_loadu_si512(kUpper), y);
}

inline __m512i rounded_halves(Float16, __m512 a, __m512 b) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const __m256i x = _mm512_cvtps_ph(a, kNearest), y = _mm512_cvtps_ph(b, kNearest);
  return _mm512_inserti64x4(_mm512_castsi256_si512(x), y, 1);
}

// Returns whether any of 32 masters may be another than its parameter, as below.
template <class Out>
inline bool any_other(Out, __m512 a, __m512 b, const uint16_t* parameter) {
  return _mm512_cmpneq_epi16_mask(rounded_halves(Out{}, a, b), _mm512_loadu_si512(parameter));
}
#endif

// Returns whether any of these masters may be another than its parameter, once rounded. Each update asks, and most often
// none is: what little is wrong (of ties, and of NaN) costs time alone.
template <class Out>
bool any_other(const float* __restrict master, const typename Out::Stored* __restrict parameter, int64_t begin,
               int64_t end) {
  uint32_t other = 0;
#if defined(__AVX512BW__)
  if constexpr (!__is_same(Out, Float32)) {
    __m512i found = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (; begin + 32 <= end; begin += 32) {
      const float* values = master + begin;
      const __m512i rounded = rounded_halves(Out{}, _mm512_loadu_ps(values), _mm512_loadu_ps(values + 16));
      const __m512i stored = _mm512_loadu_si512(parameter + begin);
      found = _mm512_ternarylogic_epi32(found, rounded, stored, 0xF6);  // found | (rounded ^ stored)
    }
    other |= static_cast<uint32_t>(_mm512_test_epi32_mask(found, found));
  }
#endif
#pragma omp simd reduction(| : other)
  for (int64_t i = begin; i < end; ++i) other |= difference<Out>(master[i], parameter[i]);
  return other != 0;
}

template <class Out>
__attribute__((noinline, cold)) void take_others(float* __restrict master,
                                                 const typename Out::Stored* __restrict parameter, int64_t begin,
                                                 int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    if (difference<Out>(master[i], parameter[i])) master[i] = Out::taken(master[i], parameter[i]);
  }
}

template <class Out>
void take_written(float* __restrict master, const typename Out::Stored* __restrict parameter, int64_t begin,
                  int64_t end) {
  if (__builtin_expect(any_other<Out>(master, parameter, begin, end), 0)) {
    take_others<Out>(master, parameter, begin, end);
  }
}

}  // namespace
}  // namespace dos
