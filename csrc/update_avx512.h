// The formula of kernels.cpp in AVX-512, operation for operation, for the cases that compilers make slower
// than they need be: 16-bit parameters, without amsgrad, without decay of weights in the gradient, for beta1 above 0.5.
#pragma once

#include "blocks.h"
#include "vectors_avx512.h"
#include "written.h"

namespace dos {
namespace {

struct Step {
  explicit Step(const AdamScalars& s)
      : grad_scale(all(s.grad_scale)),
        decay(all(s.decay)),
        one_minus_beta1(all(s.one_minus_beta1)),
        beta2(all(s.beta2)),
        one_minus_beta2(all(s.one_minus_beta2)),
        inv_bias_correction2_sqrt(all(s.inv_bias_correction2_sqrt)),
        eps(all(s.eps)),
        minus_step_size(all(-s.step_size)) {}

  DOS_INLINE void moments(__m512 g, __m512& m, __m512& v) const {
    g = g * grad_scale;
    m = _mm512_fmadd_ps(one_minus_beta1, g - m, m);
    v = _mm512_fmadd_ps(one_minus_beta2 * g, g, beta2 * v);
  }
  DOS_INLINE __m512 quotient(__m512 m, __m512 root) const {
    return m / _mm512_fmadd_ps(root, inv_bias_correction2_sqrt, eps);
  }
  DOS_INLINE __m512 parameter(__m512 p, __m512 quotient) const {
    return _mm512_fmadd_ps(minus_step_size, quotient, p * decay);
  }

  // Updates 16 elements of moments in float and returns the new parameter, whose NaN is not yet the canonical one.
  DOS_INLINE __m512 update(float* exp_avg, float* exp_avg_sq, __m512 g, __m512 p) const {
    __m512 m = _mm512_loadu_ps(exp_avg), v = _mm512_loadu_ps(exp_avg_sq);
    moments(g, m, v);
    _mm512_storeu_ps(exp_avg, canonical(m));
    _mm512_storeu_ps(exp_avg_sq, canonical(v));
    return parameter(p, quotient(m, _mm512_sqrt_ps(v)));
  }

  const __m512 grad_scale, decay, one_minus_beta1, beta2, one_minus_beta2, inv_bias_correction2_sqrt, eps,
      minus_step_size;
};

// Updates whole blocks of kBlock with a split master and moments in float; returns their end.
template <class Grad>
int64_t update_split(const AdamArrays& arrays, const AdamScalars& scalars, int64_t begin, int64_t end) {
  const auto* grad = static_cast<const typename Grad::Stored*>(arrays.grad);
  auto* param = static_cast<uint16_t*>(arrays.param);
  auto* exp_avg = static_cast<float*>(arrays.exp_avg);
  auto* exp_avg_sq = static_cast<float*>(arrays.exp_avg_sq);
  int16_t* rest = arrays.rest;
  const Step step(scalars);
  const auto update = [&](__m512 g, __m512 p, int64_t i) __attribute__((always_inline)) {
    return canonical(step.update(exp_avg + i, exp_avg_sq + i, g, p));
  };
  int64_t block = begin;
  for (; block + kBlock <= end; block += kBlock) {
    prefetch(grad, block);
    prefetch(param, block);
    prefetch(rest, block);
    prefetch(exp_avg, block);
    prefetch(exp_avg_sq, block);
    for (int64_t i = block; i < block + kBlock; i += 32) {
      const Two g = Vectors<Grad>::load(grad + i), p = Vectors<Split>::load(param + i, rest + i);
      Vectors<Split>::store(param + i, rest + i, {update(g.a, p.a, i), update(g.b, p.b, i + 16)});
    }
  }
  return block;
}

// The same with a whole master and its 16-bit copy, which is compared where user code may have written to it.
template <class Grad, class Out>
int64_t update_whole(const AdamArrays& arrays, const AdamScalars& scalars, int64_t begin, int64_t end) {
  const auto* grad = static_cast<const typename Grad::Stored*>(arrays.grad);
  auto* param = static_cast<float*>(arrays.param);
  auto* exp_avg = static_cast<float*>(arrays.exp_avg);
  auto* exp_avg_sq = static_cast<float*>(arrays.exp_avg_sq);
  auto* out = static_cast<uint16_t*>(arrays.out);
  const bool takes = arrays.takes_written();
  const Step step(scalars);
  const auto update = [&](__m512 g, __m512 p, int64_t i) __attribute__((always_inline)) {
    p = step.update(exp_avg + i, exp_avg_sq + i, g, p);
    if constexpr (__is_same(Out, BFloat16)) p = Vectors<BFloat16>::off_tie(p);
    return canonical(p);
  };
  int64_t block = begin;
  for (; block + kBlock <= end; block += kBlock) {
    prefetch(grad, block);
    prefetch(param, block);
    prefetch(out, block);
    prefetch(exp_avg, block);
    prefetch(exp_avg_sq, block);
    for (int64_t i = block; i < block + kBlock; i += 32) {
      const Two g = Vectors<Grad>::load(grad + i);
      Two p = Vectors<Float32>::load(param + i);
      if (takes && __builtin_expect(any_other(Out{}, p.a, p.b, out + i), 0)) {
        take_others<Out>(param, out, i, i + 32);
        p = Vectors<Float32>::load(param + i);
      }
      const Two now = {update(g.a, p.a, i), update(g.b, p.b, i + 16)};
      Vectors<Float32>::store(param + i, now);
      _mm512_storeu_si512(out + i, rounded_halves(Out{}, now.a, now.b));
    }
  }
  return block;
}

}  // namespace
}  // namespace dos
