// The formulas. The headers named avx512 have the commonest cases of 16-bit parameters and codes once more, because
// compilers make it slow.
//
// The compiler vectorises these loops; vector body and scalar tail agree because every operation is
// correctly rounded and none may be contracted or reordered (-ffp-contract=off, no -ffast-math).
// Everything is in an unnamed namespace and no standard template is used: a shared inline function
// compiled here with AVX-512 could otherwise be the copy that the linker keeps for everybody.
#include "blocks.h"
#include "formats.h"
#include "kernels.h"
#include "written.h"
#if defined(__AVX512BW__)
#include "codes_avx512.h"
#include "update_avx512.h"
#endif

#define DOS_CONCAT_(a, b) a##b
#define DOS_CONCAT(a, b) DOS_CONCAT_(a, b)

namespace dos {
namespace {

#if defined(__AVX512BW__)
constexpr bool kRoundsHalf = true;

inline void round_half(const float* __restrict values, uint16_t* __restrict out, int64_t begin, int64_t end) {
  for (; begin + 32 <= end; begin += 32) Vectors<Float16>::store(out + begin, Vectors<Float32>::load(values + begin));
  for (; begin < end; ++begin) out[begin] = Float16::store(values[begin]);
}
#else
constexpr bool kRoundsHalf = false;

template <class Out>
void round_half(const float*, Out*, int64_t, int64_t) {}
#endif

template <class Grad, class Param, class Out, bool kAmsgrad, bool kL2, bool kCodes>
void adam(const AdamArrays& arrays, const AdamScalars& scalars, int64_t begin, int64_t end) {
  const auto* __restrict grad = static_cast<const typename Grad::Stored*>(arrays.grad);
  auto* __restrict param = static_cast<typename Param::Stored*>(arrays.param);
  float* __restrict max_exp_avg_sq = arrays.max_exp_avg_sq;
  auto* __restrict out = static_cast<typename Out::Stored*>(arrays.out);
  int16_t* __restrict rest = arrays.rest;
  constexpr bool kSplit = __is_same(Param, Split);
  [[maybe_unused]] constexpr bool kHalfOut = __is_same(Out, BFloat16) || __is_same(Out, Float16);
  // The processor's own rounding of a part that was just updated is faster than that which compilers can vectorise.
  constexpr bool kRoundedLater = kRoundsHalf && __is_same(Out, Float16);
#if defined(__AVX512BW__)
  if constexpr ((kCodes || kSplit || kHalfOut) && !kAmsgrad && !kL2) {
    if (scalars.one_minus_beta1 < 0.5f) {
      if constexpr (kCodes) return CodedUpdate<Grad, Param, Out>(arrays, scalars).run(begin, end);
      if constexpr (kSplit) begin = update_split<Grad>(arrays, scalars, begin, end);
      if constexpr (kHalfOut && !kCodes) begin = update_whole<Grad, Out>(arrays, scalars, begin, end);
    }
  }
#endif
  // Moments in codes are decoded block by block.
  auto* mean_codes = static_cast<int8_t*>(arrays.exp_avg);
  auto* square_codes = static_cast<uint8_t*>(arrays.exp_avg_sq);
  alignas(64) float decoded[kCodes ? 3 : 1][Codes::kTogether * kScaled];
  float* __restrict exp_avg = kCodes ? decoded[0] : static_cast<float*>(arrays.exp_avg);
  float* __restrict exp_avg_sq = kCodes ? decoded[1] : static_cast<float*>(arrays.exp_avg_sq);
  float* __restrict roots = decoded[kCodes ? 2 : 0];
  alignas(64) uint32_t salts[kCodes ? Codes::kTogether * kScaled : 1];
  alignas(64) uint16_t drawn[kCodes ? Codes::kTogether * kScaled : 1];
  const AdamScalars s = scalars;
  // As torch.lerp: exact at weight 1 (beta1 = 0), where m + 1 * (g - m) is not.
  const bool lerp_from_grad = !(s.one_minus_beta1 < 0.5f);
  const float lerp_weight = lerp_from_grad ? -s.beta1 : s.one_minus_beta1;

  constexpr int64_t kSize = kCodes ? Codes::kTogether * kScaled : kBlock;
  if constexpr (kCodes) {
    for (int64_t k = 0; k < kSize; ++k) salts[k] = Codes::salt(s.seed, k);
  }
  for (int64_t block = begin; block < end; block += kSize) {
    const int64_t stop = end_of_block(block, end, kSize), blocks = (stop - block) / kScaled;
    if constexpr (kCodes) {
      Codes::decode(blocks, mean_codes + block, arrays.exp_avg_scale + block / kScaled, exp_avg);
      Codes::decode_squares(blocks, square_codes + block, arrays.exp_avg_sq_scale + block / kScaled, exp_avg_sq);
    }
    for (int64_t part = block; part < stop; part += kBlock) {
      prefetch(grad, part);
      prefetch(param, part);
      if constexpr (kCodes) {
        prefetch(mean_codes, part);
        prefetch(square_codes, part);
      } else {
        prefetch(exp_avg, part);
        prefetch(exp_avg_sq, part);
      }
      if constexpr (kAmsgrad) prefetch(max_exp_avg_sq, part);
      if constexpr (!__is_same(Out, None)) prefetch(out, part);
      if constexpr (kSplit) prefetch(rest, part);
      if constexpr (!__is_same(Out, None)) {
        if (arrays.takes_written() && (part - begin) % kChecked == 0) {
          take_written<Out>(param, out, part, end_of_block(part, end, kChecked));
        }
      }
      const auto update = [&](int64_t count) __attribute__((always_inline)) {
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) {
          const int64_t i = part + j;
          const int64_t k = kCodes ? i - block : i;  // within the moments
          float g = Grad::load(grad[i]) * s.grad_scale;
          float p;
          if constexpr (kSplit) {
            p = Split::load(param[i], rest[i]);
          } else {
            p = Param::load(param[i]);
          }
          float m = exp_avg[k];
          float v = exp_avg_sq[k];
          if constexpr (kL2) g = __builtin_fmaf(s.l2, p, g);
          p = p * s.decay;
          m = __builtin_fmaf(lerp_weight, g - m, lerp_from_grad ? g : m);
          v = __builtin_fmaf(s.one_minus_beta2 * g, g, s.beta2 * v);
          if constexpr (kCodes) {
            exp_avg[k] = m;
            drawn[k] = Codes::draw(m, v, salts[k]);
          } else {
            exp_avg[k] = canonical(m);
            exp_avg_sq[k] = canonical(v);
          }
          if constexpr (kAmsgrad) {
            const float previous = max_exp_avg_sq[i];
            v = (v > previous) | (v != v) ? v : previous;
            max_exp_avg_sq[i] = canonical(v);
          }
          const float root = __builtin_sqrtf(v);
          if constexpr (kCodes) roots[k] = root;
          const float denom = __builtin_fmaf(root, s.inv_bias_correction2_sqrt, s.eps);
          p = __builtin_fmaf(-s.step_size, m / denom, p);
          if constexpr (kSplit) {
            const bool nan = p != p;
            p = BFloat16::off_tie(p);
            param[i] = nan ? 0x7FC0u : BFloat16::store_off_tie(p);
            rest[i] = static_cast<int16_t>(nan ? 0u : bits_of(p));
          } else {
            // Before canonical: after it, compilers compile two cases of all statements here, at twice the time.
            if constexpr (__is_same(Out, BFloat16)) p = BFloat16::off_tie(p);
            p = canonical(p);
            param[i] = Param::store(p);
            if constexpr (__is_same(Out, BFloat16)) {
              out[i] = BFloat16::store_off_tie(p);
            } else if constexpr (!__is_same(Out, None) && !kRoundedLater) {
              out[i] = Out::store(p);
            }
          }
        }
      };
      // A loop of known length is the faster one.
      kCodes || stop - part >= kBlock ? update(kBlock) : update(stop - part);
      if constexpr (kRoundedLater) round_half(param, out, part, stop - part < kBlock ? stop : part + kBlock);
    }
    if constexpr (kCodes) {
      Codes::encode(blocks, exp_avg, roots, drawn, mean_codes + block, arrays.exp_avg_scale + block / kScaled,
                    square_codes + block, arrays.exp_avg_sq_scale + block / kScaled);
    }
  }
}

template <class Src>
double sum_of_squares_range(const void* src_, int64_t begin, int64_t end) {
  constexpr int kLanes = 32;  // independent sums, so that the order is fixed and the additions overlap
  const auto* src = static_cast<const typename Src::Stored*>(src_);
  double lanes[kLanes] = {};
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double x = Src::load(src[i + lane]);
      lanes[lane] += x * x;
    }
  }
  for (int lane = 0; i < end; ++i, ++lane) {
    const double x = Src::load(src[i]);
    lanes[lane] += x * x;
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// Selects the kernel for dtypes.
template <class F>
auto with_type(DType type, F&& f) {
  switch (type) {
    case DType::bfloat16: return f(BFloat16{});
    case DType::float16: return f(Float16{});
    default: return f(Float32{});
  }
}

template <class Grad, class Param, class Out>
void adam_with(const AdamArrays& arrays, const AdamScalars& scalars, int64_t begin, int64_t end) {
  (arrays.exp_avg_scale  // without amsgrad
       ? (scalars.use_l2 ? adam<Grad, Param, Out, false, true, true> : adam<Grad, Param, Out, false, false, true>)
   : scalars.amsgrad
       ? (scalars.use_l2 ? adam<Grad, Param, Out, true, true, false> : adam<Grad, Param, Out, true, false, false>)
       : (scalars.use_l2 ? adam<Grad, Param, Out, false, true, false> : adam<Grad, Param, Out, false, false, false>)
  )(arrays, scalars, begin, end);
}

void adam_any(const AdamArrays& arrays, const AdamScalars& scalars, int64_t begin, int64_t end) {
  with_type(arrays.grad_type, [&](auto grad) {
    using Grad = decltype(grad);
    if (arrays.rest) {
      adam_with<Grad, Split, None>(arrays, scalars, begin, end);
    } else if (!arrays.out) {
      with_type(arrays.param_type, [&](auto param) {
        adam_with<Grad, decltype(param), None>(arrays, scalars, begin, end);
      });
    } else {
      with_type(arrays.out_type, [&](auto out) {
        adam_with<Grad, Float32, decltype(out)>(arrays, scalars, begin, end);
      });
    }
  });
}

double sum_of_squares_any(const void* src, DType src_type, int64_t begin, int64_t end) {
  return with_type(src_type, [&](auto type) { return sum_of_squares_range<decltype(type)>(src, begin, end); });
}

}  // namespace

extern const Kernels DOS_CONCAT(kernels_, DOS_ISA);
const Kernels DOS_CONCAT(kernels_, DOS_ISA) = {adam_any, sum_of_squares_any};

}  // namespace dos
