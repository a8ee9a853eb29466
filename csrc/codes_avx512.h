// The update of moments in codes, in AVX-512: the loops in kernels.cpp, as compilers translate them, take
// half as long again. The operations are the same, so the results are the same to the bit.
//
// The update passes over the elements twice, at a distance of one group: it makes the new moments of
// a group, and finishes the group before, whose scales are known by then. The two take turns every 32
// elements, and roots and quotients are used some instructions after they were begun, so that the
// dividing unit and all others work at the same time.
#pragma once

#include <immintrin.h>

#include "update_avx512.h"
#include "written.h"

namespace dos {
namespace {

constexpr int64_t kGroup = 4 * kScaled;
constexpr int64_t kPart = 64;  // the codes of this number of elements fill a vector

template <class Grad, class Param, class Out>
class CodedUpdate {
 public:
  CodedUpdate(const AdamArrays& arrays, const AdamScalars& s) : arrays_(arrays), step_(s) {
    for (int64_t k = 0; k < kGroup; ++k) salts_[k] = Codes::salt(s.seed, k);
  }

  void run(int64_t begin, int64_t end) {
    Moments moments[2];
    for (int64_t group = begin, turn = 0; group < end + kGroup; group += kGroup, turn ^= 1) {
      Moments &now = moments[turn], &before = moments[turn ^ 1];
      const int64_t made = group < end ? end_of_block(group, end, kGroup) - group : 0;
      const int64_t left = group > begin ? end_of_block(group - kGroup, end, kGroup) - (group - kGroup) : 0;
      const int64_t both = made < left ? made : left;
      if constexpr (!__is_same(Out, None)) {
        if (arrays_.takes_written() && made > 0) {
          take_written<Out>(static_cast<float*>(arrays_.param), static_cast<const typename Out::Stored*>(arrays_.out),
                            group, group + made);
        }
      }
      pass<true, true>(group, 0, both, now, before);
      pass<true, false>(group, both, made, now, before);
      pass<false, true>(group, both, left, now, before);
      if (made > 0) scales(group / kScaled, made / kScaled, now);
    }
  }

 private:
  // The values of one group, from its first pass to its second.
  struct Moments {
    alignas(64) float means[kGroup], roots[kGroup];
    alignas(64) uint32_t drawn[kGroup];
    float mean_factors[4], root_factors[4];
    __mmask16 finite[4];
  };

  // Makes the moments of elements `k` to `end` of the group, and finishes the same elements of the group before it.
  template <bool kMake, bool kFinish>
  DOS_INLINE void pass(int64_t group, int64_t k, int64_t end, Moments& __restrict now,
                       const Moments& __restrict before) {
    const auto* __restrict grad = static_cast<const typename Grad::Stored*>(arrays_.grad);
    auto* __restrict mean_codes = static_cast<int8_t*>(arrays_.exp_avg);
    auto* __restrict root_codes = static_cast<uint8_t*>(arrays_.exp_avg_sq);
    auto* __restrict param = static_cast<typename Param::Stored*>(arrays_.param);
    auto* __restrict out = static_cast<typename Out::Stored*>(arrays_.out);
    int16_t* __restrict rest = arrays_.rest;
    const Step step = step_;
    const __m512i magnitude = kept(all(0x7FFFFFFFu)), spread = kept(all(Codes::kSpread));
    const __m512i chance = kept(_mm512_set1_epi16(0x7F)), one = kept(_mm512_set1_epi16(1));
    for (; k < end; k += kPart) {
      const int64_t block = k / kScaled, first = group + k, earlier = first - kGroup;
      __m512 mean_scale, root_scale, mean_factor, root_factor;
      __m512i most_mean, most_root, new_means[2], new_roots[2];
      if constexpr (kMake) {
        prefetch(grad, first);
        prefetch(mean_codes, first);
        prefetch(root_codes, first);
        prefetch(param, first);
        if constexpr (kSplit) prefetch(rest, first);
        if constexpr (!__is_same(Out, None)) prefetch(out, first);
        mean_scale = all(arrays_.exp_avg_scale[first / kScaled]);
        root_scale = all(arrays_.exp_avg_sq_scale[first / kScaled]);
        most_mean = k % kScaled ? most_means_[block] : _mm512_setzero_si512();
        most_root = k % kScaled ? most_roots_[block] : _mm512_setzero_si512();
      }
      if constexpr (kFinish) {
        mean_factor = all(before.mean_factors[block]);
        root_factor = all(before.root_factors[block]);
      }

      const auto root = [&](__m512 g, int64_t j) __attribute__((always_inline)) {
        __m512 m = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load16(mean_codes + first + j))) * mean_scale;
        const __m512i level = _mm512_add_epi32(_mm512_cvtepu8_epi32(load16(root_codes + first + j)), all(1u));
        __m512 v = _mm512_cvtepi32_ps(level) * root_scale;
        v = v * v;
        step.moments(g, m, v);
        most_mean = _mm512_max_epu32(most_mean, _mm512_and_si512(bits_of(m), magnitude));
        const __m512i salt = _mm512_load_si512(salts_ + k + j);
        const __m512i all_three = _mm512_ternarylogic_epi32(bits_of(m), bits_of(v), salt, 0x96);  // exclusive or
        _mm512_store_ps(now.means + k + j, m);
        _mm512_store_si512(now.drawn + k + j, _mm512_mullo_epi32(all_three, spread));
        return _mm512_sqrt_ps(v);
      };
      const auto take = [&](__m512 root, int64_t j) __attribute__((always_inline)) {
        most_root = _mm512_max_epu32(most_root, bits_of(root));
        _mm512_store_ps(now.roots + k + j, root);
      };
      const auto quotient = [&](int64_t j) __attribute__((always_inline)) {
        return step.quotient(_mm512_load_ps(before.means + k + j), _mm512_load_ps(before.roots + k + j));
      };
      // See Codes::encode.
      const auto encode = [&](int64_t j, __m512i& means, __m512i& roots) __attribute__((always_inline)) {
        const auto drawn = [&](int64_t i) { return _mm512_load_si512(before.drawn + k + i); };
        const auto mean = [&](int64_t i) {
          return _mm512_cvtps_epi32(_mm512_load_ps(before.means + k + i) * mean_factor);
        };
        const auto level = [&](int64_t i) {
          const __m512i parts = _mm512_cvtps_epi32(_mm512_load_ps(before.roots + k + i) * root_factor);
          return _mm512_srli_epi32(_mm512_add_epi32(parts, _mm512_srli_epi32(drawn(i), 20)), 12);
        };
        const __m512i chances = _mm512_packus_epi32(upper_half(drawn(j)), upper_half(drawn(j + 16)));
        const __m512i low = _mm512_and_si512(chances, chance);
        means = _mm512_srai_epi16(_mm512_add_epi16(_mm512_packs_epi32(mean(j), mean(j + 16)), low), 7);
        roots = _mm512_subs_epu16(_mm512_packus_epi32(level(j), level(j + 16)), one);
      };
      const auto finish = [&](Two q, int64_t i) __attribute__((always_inline)) {
        const auto update = [&](__m512 p, __m512 quotient) __attribute__((always_inline)) {
          p = step.parameter(p, quotient);
          if constexpr (__is_same(Out, BFloat16)) p = Vectors<BFloat16>::off_tie(p);
          return canonical(p);
        };
        if constexpr (kSplit) {
          const Two p = Vectors<Split>::load_dealt(param + i, rest + i);
          q = dealt(q);
          Vectors<Split>::store_dealt(param + i, rest + i, {update(p.a, q.a), update(p.b, q.b)});
        } else {
          Two p = Vectors<Param>::load(param + i);
          p = {update(p.a, q.a), update(p.b, q.b)};
          Vectors<Param>::store(param + i, p);
          if constexpr (!__is_same(Out, None)) Vectors<Out>::store(out + i, p);
        }
      };

#pragma GCC unroll 2
      for (int64_t h = 0; h < 2; ++h) {
        const int64_t j = 32 * h;
        Two roots, quotients;
        if constexpr (kMake) {
          const Two g = Vectors<Grad>::load(grad + first + j);
          roots = {root(g.a, j), root(g.b, j + 16)};
        }
        if constexpr (kFinish) {
          quotients = {quotient(j), quotient(j + 16)};
          encode(j, new_means[h], new_roots[h]);
        }
        if constexpr (kMake) take(roots.a, j), take(roots.b, j + 16);
        if constexpr (kFinish) finish(quotients, earlier + j);
      }
      if constexpr (kMake) most_means_[block] = most_mean, most_roots_[block] = most_root;
      if constexpr (kFinish) {
        // Packing worked within each quarter of the vectors.
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const __m512i mean = _mm512_packs_epi16(new_means[0], new_means[1]);
        const __m512i root = _mm512_packus_epi16(new_roots[0], new_roots[1]);
        const __mmask16 finite = before.finite[block];
        _mm512_storeu_si512(mean_codes + earlier, _mm512_maskz_permutexvar_epi32(finite, order, mean));
        _mm512_storeu_si512(root_codes + earlier, _mm512_maskz_permutexvar_epi32(finite, order, root));
      }
    }
  }

  // Computes the scales of the blocks whose moments were made.
  void scales(int64_t first, int64_t blocks, Moments& now) {
    alignas(16) uint32_t means[4], roots[4];
    alignas(16) float mean_scales[4], root_scales[4];
    _mm_store_si128(reinterpret_cast<__m128i*>(means), largest_of_each(most_means_));
    _mm_store_si128(reinterpret_cast<__m128i*>(roots), largest_of_each(most_roots_));
    Codes::scales(4, means, roots, mean_scales, root_scales);
    for (int64_t b = 0; b < 4; ++b) {
      now.mean_factors[b] = Codes::mean_factor(mean_scales[b]);
      now.root_factors[b] = Codes::root_factor(root_scales[b]);
      now.finite[b] = mean_scales[b] == mean_scales[b] ? 0xFFFF : 0;
    }
    for (int64_t b = 0; b < blocks; ++b) {
      arrays_.exp_avg_scale[first + b] = mean_scales[b];
      arrays_.exp_avg_sq_scale[first + b] = root_scales[b];
    }
  }

  static constexpr bool kSplit = __is_same(Param, Split);

  const AdamArrays arrays_;
  const Step step_;
  alignas(64) uint32_t salts_[kGroup];
  // Of the blocks of one group.
  __m512i most_means_[4] = {}, most_roots_[4] = {};
};

}  // namespace
}  // namespace dos
