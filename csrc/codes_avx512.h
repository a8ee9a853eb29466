// The update of moments in codes, in AVX-512: what compilers make of the loops in kernels.cpp takes
// a third longer. The operations are the same, so the results are the same to the bit.
//
// The update goes through the elements twice, at a distance of one group: `moments` makes the new
// moments of a group, `results` the parameters and codes of the group before. So divisions do not
// wait for the square roots of the same elements, nor codes for the scale of their block.
#pragma once

#include <immintrin.h>

#include "update_avx512.h"

namespace dos {
namespace {

constexpr int64_t kGroup = 4 * kScaled;
constexpr int64_t kPart = 64;  // the codes of so many elements fill a vector

template <class Grad, class Param, class Out>
class CodedUpdate {
 public:
  CodedUpdate(const AdamArrays& arrays, const AdamScalars& s) : arrays_(arrays), step_(s) {
    for (int64_t k = 0; k < kScaled; ++k) salts_[k] = Codes::salt(s.seed, k);
  }

  void run(int64_t begin, int64_t end) {
    const Step step = step_;  // of which the compiler knows that no store changes it
    for (int64_t group = begin; group < end + kGroup; group += kGroup) {
      const int64_t before = group - kGroup;
      for (int64_t k = 0; k < kGroup; k += kPart) {
        if (group + k < end) moments(step, group, k);
        if (before >= begin && before + k < end) results(step, before, k);
      }
      if (group < end) scales(group / kScaled, (end_of_block(group, end, kGroup) - group) / kScaled);
      turn_ ^= 1;
    }
  }

 private:
  DOS_INLINE void moments(const Step& step, int64_t group, int64_t k) {
    const auto* grad = static_cast<const typename Grad::Stored*>(arrays_.grad);
    const auto* mean_codes = static_cast<const int8_t*>(arrays_.exp_avg);
    const auto* root_codes = static_cast<const uint8_t*>(arrays_.exp_avg_sq);
    const int64_t first = group + k, block = k / kScaled;
    prefetch(grad, first);
    prefetch(mean_codes, first);
    prefetch(root_codes, first);
    const __m512 mean_scale = all(arrays_.exp_avg_scale[first / kScaled]);
    const __m512 root_scale = all(arrays_.exp_avg_sq_scale[first / kScaled]);
    __m512i most_mean = k % kScaled ? most_means_[block] : _mm512_setzero_si512();
    __m512i most_root = k % kScaled ? most_roots_[block] : _mm512_setzero_si512();
    const auto update = [&](__m512 g, int64_t at) __attribute__((always_inline)) {
      __m512 m = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load16(mean_codes + group + at))) * mean_scale;
      const __m512i code = _mm512_cvtepu8_epi32(load16(root_codes + group + at));
      __m512 v = _mm512_cvtepi32_ps(_mm512_add_epi32(code, all(1u))) * root_scale;
      v = v * v;
      step.moments(g, m, v);
      const __m512 root = _mm512_sqrt_ps(v);
      most_mean = _mm512_max_epu32(most_mean, _mm512_and_si512(bits_of(m), all(0x7FFFFFFFu)));
      most_root = _mm512_max_epu32(most_root, bits_of(root));
      const __m512i salt = _mm512_load_si512(salts_ + at % kScaled);
      const __m512i all_three = _mm512_ternarylogic_epi32(bits_of(m), bits_of(v), salt, 0x96);  // exclusive or
      _mm512_store_ps(means_[turn_] + at, m);
      _mm512_store_ps(roots_[turn_] + at, root);
      _mm512_store_si512(drawn_[turn_] + at, _mm512_mullo_epi32(all_three, all(Codes::kSpread)));
    };
    for (int64_t at = k; at < k + kPart; at += 32) {
      const Two g = Vectors<Grad>::load(grad + group + at);
      update(g.a, at);
      update(g.b, at + 16);
    }
    most_means_[block] = most_mean, most_roots_[block] = most_root;
  }

  // Of the blocks whose moments were made.
  DOS_INLINE void scales(int64_t first, int64_t blocks) {
    alignas(16) uint32_t means[4], roots[4];
    alignas(16) float mean_scales[4], root_scales[4];
    _mm_store_si128(reinterpret_cast<__m128i*>(means), largest_of_each(most_means_));
    _mm_store_si128(reinterpret_cast<__m128i*>(roots), largest_of_each(most_roots_));
    Codes::scales(4, means, roots, mean_scales, root_scales);
    for (int64_t b = 0; b < 4; ++b) {
      mean_factors_[b] = Codes::mean_factor(mean_scales[b]);
      root_factors_[b] = Codes::root_factor(root_scales[b]);
    }
    for (int64_t b = 0; b < blocks; ++b) {
      arrays_.exp_avg_scale[first + b] = mean_scales[b];
      arrays_.exp_avg_sq_scale[first + b] = root_scales[b];
    }
  }

  DOS_INLINE void results(const Step& step, int64_t group, int64_t k) {
    auto* param = static_cast<typename Param::Stored*>(arrays_.param);
    auto* out = static_cast<typename Out::Stored*>(arrays_.out);
    const float *means = means_[turn_ ^ 1], *roots = roots_[turn_ ^ 1];
    prefetch(param, group + k);
    if constexpr (kSplit) prefetch(arrays_.rest, group + k);
    if constexpr (!__is_same(Out, None)) prefetch(out, group + k);
    const auto update = [&](__m512 p, int64_t at) __attribute__((always_inline)) {
      p = step.parameter(p, _mm512_load_ps(means + at), _mm512_load_ps(roots + at));
      if constexpr (__is_same(Out, BFloat16)) p = Vectors<BFloat16>::off_tie(p);
      return canonical(p);
    };
    for (int64_t at = k; at < k + kPart; at += 32) {
      const int64_t i = group + at;
      Two p;
      if constexpr (kSplit) {
        p = Vectors<Split>::load(param + i, arrays_.rest + i);
      } else {
        p = Vectors<Param>::load(param + i);
      }
      p = {update(p.a, at), update(p.b, at + 16)};
      if constexpr (kSplit) {
        Vectors<Split>::store(param + i, arrays_.rest + i, p);
      } else {
        Vectors<Param>::store(param + i, p);
      }
      if constexpr (!__is_same(Out, None)) Vectors<Out>::store(out + i, p);
    }
    encode(group, k);
  }

  // See Codes::encode.
  DOS_INLINE void encode(int64_t group, int64_t k) {
    const int64_t turn = turn_ ^ 1, first = group + k, block = k / kScaled;
    const __m512 mean_factor = all(mean_factors_[block]), root_factor = all(root_factors_[block]);
    const float scale = arrays_.exp_avg_scale[first / kScaled];
    const __mmask16 finite = scale == scale ? 0xFFFF : 0;
    __m512i means[2], roots[2];
    for (int64_t h = 0; h < 2; ++h) {
      const auto drawn = [&](int64_t at) { return _mm512_load_si512(drawn_[turn] + k + h * 32 + at); };
      const auto mean = [&](int64_t at) {
        return _mm512_cvtps_epi32(_mm512_load_ps(means_[turn] + k + h * 32 + at) * mean_factor);
      };
      const auto root = [&](int64_t at) {
        const __m512i parts = _mm512_cvtps_epi32(_mm512_load_ps(roots_[turn] + k + h * 32 + at) * root_factor);
        return _mm512_srli_epi32(_mm512_add_epi32(parts, _mm512_srli_epi32(drawn(at), 20)), 12);
      };
      const __m512i chances = _mm512_packus_epi32(upper_half(drawn(0)), upper_half(drawn(16)));
      const __m512i low = _mm512_and_si512(chances, _mm512_set1_epi16(0x7F));
      means[h] = _mm512_srai_epi16(_mm512_add_epi16(_mm512_packs_epi32(mean(0), mean(16)), low), 7);
      roots[h] = _mm512_subs_epu16(_mm512_packus_epi32(root(0), root(16)), _mm512_set1_epi16(1));
    }
    // Packing worked within each quarter of the vectors.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i mean = _mm512_packs_epi16(means[0], means[1]), root = _mm512_packus_epi16(roots[0], roots[1]);
    _mm512_storeu_si512(static_cast<int8_t*>(arrays_.exp_avg) + first,
                        _mm512_maskz_permutexvar_epi32(finite, order, mean));
    _mm512_storeu_si512(static_cast<uint8_t*>(arrays_.exp_avg_sq) + first,
                        _mm512_maskz_permutexvar_epi32(finite, order, root));
  }

  static constexpr bool kSplit = __is_same(Param, Split);

  const AdamArrays arrays_;
  const Step step_;
  alignas(64) uint32_t salts_[kScaled];
  // Of two groups in turn, of which `turn_` says whose moments are being made.
  int64_t turn_ = 0;
  alignas(64) float means_[2][kGroup], roots_[2][kGroup];
  alignas(64) uint32_t drawn_[2][kGroup];
  // Of the blocks of one group.
  __m512i most_means_[4] = {}, most_roots_[4] = {};
  float mean_factors_[4], root_factors_[4];
};

}  // namespace
}  // namespace dos
