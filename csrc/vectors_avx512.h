// Stored elements as vectors in AVX-512, 32 at a time. They convert as in formats.h, to the bit.
#pragma once

#include <immintrin.h>

#include "formats.h"

#define DOS_INLINE inline __attribute__((always_inline))

namespace dos {
namespace {

struct Two {
  __m512 a, b;
};

DOS_INLINE __m512 all(float x) { return _mm512_set1_ps(x); }
DOS_INLINE __m512i all(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
DOS_INLINE __m512i bits_of(__m512 x) { return _mm512_castps_si512(x); }
DOS_INLINE __m512 float_of(__m512i x) { return _mm512_castsi512_ps(x); }
DOS_INLINE __m512i upper_half(__m512i x) { return _mm512_srli_epi32(x, 16); }
DOS_INLINE __m128i load16(const void* bytes) { return _mm_loadu_si128(static_cast<const __m128i*>(bytes)); }

// A constant whose value the compiler does not know, so that it keeps the register and does not make it anew.
DOS_INLINE __m512i kept(__m512i x) {
  asm("" : "+v"(x));
  return x;
}

// Packing and unpacking work within each quarter of a vector, and distribute elements to two vectors in fours. The
// 64-bit parts of a vector change places before and after, so that elements stay in order.
DOS_INLINE Two joined(__m512i lower, __m512i upper) {
  return {float_of(_mm512_unpacklo_epi16(lower, upper)), float_of(_mm512_unpackhi_epi16(lower, upper))};
}
DOS_INLINE __m512i to_deal(__m512i halves) {
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), halves);
}
DOS_INLINE __m512i in_order(__m512i halves) {
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), halves);
}
DOS_INLINE Two dealt(Two x) { return {_mm512_shuffle_f32x4(x.a, x.b, 0x88), _mm512_shuffle_f32x4(x.a, x.b, 0xDD)}; }

// Makes any NaN the canonical one.
DOS_INLINE __m512 canonical(__m512 x) {
  return _mm512_fixupimm_ps(all(canonical(__builtin_nanf(""))), x, all(0x11111100u), 0);
}

DOS_INLINE __m128i largest_of_each(const __m512i* four) {
  const __m512i a = _mm512_max_epu32(_mm512_unpacklo_epi32(four[0], four[1]), _mm512_unpackhi_epi32(four[0], four[1]));
  const __m512i b = _mm512_max_epu32(_mm512_unpacklo_epi32(four[2], four[3]), _mm512_unpackhi_epi32(four[2], four[3]));
  const __m512i c = _mm512_max_epu32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  const __m256i d = _mm256_max_epu32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
  return _mm_max_epu32(_mm256_castsi256_si128(d), _mm256_extracti128_si256(d, 1));
}

template <class Format>
struct Vectors;

template <>
struct Vectors<Float32> {
  static DOS_INLINE Two load(const float* from) { return {_mm512_loadu_ps(from), _mm512_loadu_ps(from + 16)}; }
  static DOS_INLINE void store(float* to, Two x) {
    _mm512_storeu_ps(to, x.a);
    _mm512_storeu_ps(to + 16, x.b);
  }
};

template <>
struct Vectors<BFloat16> {
  static DOS_INLINE Two load(const uint16_t* from) {
    return joined(_mm512_setzero_si512(), to_deal(_mm512_loadu_si512(from)));
  }
  static DOS_INLINE void store(uint16_t* to, Two x) {
    const __m512i halves = _mm512_packus_epi32(rounded(bits_of(x.a)), rounded(bits_of(x.b)));
    _mm512_storeu_si512(to, in_order(halves));
  }
  static DOS_INLINE __m512 off_tie(__m512 x) {
    const __m512i bits = bits_of(x), last = _mm512_and_si512(bits, all(0x1FFFFu));
    const __m512i down = _mm512_mask_sub_epi32(bits, _mm512_cmpeq_epi32_mask(last, all(0x08000u)), bits, all(1u));
    return float_of(_mm512_mask_add_epi32(down, _mm512_cmpeq_epi32_mask(last, all(0x18000u)), bits, all(1u)));
  }

 private:
  static DOS_INLINE __m512i rounded(__m512i bits) {
    const __m512i odd = _mm512_and_si512(upper_half(bits), all(1u));
    return upper_half(_mm512_add_epi32(bits, _mm512_add_epi32(odd, all(0x7FFFu))));
  }
};

template <>
struct Vectors<Float16> {
  static DOS_INLINE Two load(const uint16_t* from) {
    const __m512i both = _mm512_loadu_si512(from);
    return {_mm512_cvtph_ps(_mm512_castsi512_si256(both)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(both, 1))};
  }
  static DOS_INLINE void store(uint16_t* to, Two x) {
    const __m256i a = _mm512_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT);
    const __m256i b = _mm512_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT);
    _mm512_storeu_si512(to, _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
  }
};

template <>
struct Vectors<Split> {
  static DOS_INLINE Two load(const uint16_t* param, const int16_t* rest) {
    return join(to_deal(_mm512_loadu_si512(param)), to_deal(_mm512_loadu_si512(rest)));
  }
  static DOS_INLINE void store(uint16_t* param, int16_t* rest, Two x) {
    const Halves halves = split(x);
    _mm512_storeu_si512(param, in_order(halves.upper));
    _mm512_storeu_si512(rest, in_order(halves.lower));
  }
  static DOS_INLINE Two load_dealt(const uint16_t* param, const int16_t* rest) {
    return join(_mm512_loadu_si512(param), _mm512_loadu_si512(rest));
  }
  static DOS_INLINE void store_dealt(uint16_t* param, int16_t* rest, Two x) {
    const Halves halves = split(x);
    _mm512_storeu_si512(param, halves.upper);
    _mm512_storeu_si512(rest, halves.lower);
  }

 private:
  struct Halves {
    __m512i upper, lower;
  };

  static DOS_INLINE Two join(__m512i upper, __m512i rests) {
    const __mmask32 zero = _mm512_testn_epi16_mask(upper, _mm512_set1_epi16(0x7FFF));
    const __m512i lower = _mm512_mask_max_epi16(rests, zero, rests, _mm512_setzero_si512());
    return joined(lower, _mm512_add_epi16(upper, _mm512_srai_epi16(lower, 15)));
  }
  static DOS_INLINE Halves split(Two x) {
    const __m512i a = bits_of(x.a), b = bits_of(x.b), low = all(0xFFFFu);
    const __m512i upper = _mm512_packus_epi32(upper_half(a), upper_half(b));
    __m512i lower = _mm512_packus_epi32(_mm512_and_si512(a, low), _mm512_and_si512(b, low));
    // A tie moves towards the even upper half.
    const __mmask32 tie = _mm512_cmpeq_epi16_mask(lower, _mm512_set1_epi16(-0x8000));
    const __mmask32 odd = _mm512_mask_test_epi16_mask(tie, upper, _mm512_set1_epi16(1));
    lower = _mm512_mask_mov_epi16(lower, tie, _mm512_set1_epi16(0x7FFF));
    lower = _mm512_mask_mov_epi16(lower, odd, _mm512_set1_epi16(-0x7FFF));
    return {_mm512_sub_epi16(upper, _mm512_srai_epi16(lower, 15)), lower};
  }
};

}  // namespace
}  // namespace dos
