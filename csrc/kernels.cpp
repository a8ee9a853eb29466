// The formulas, once. The compiler vectorises these loops; vector body and scalar tail agree because every operation
// is correctly rounded and none may be contracted or reordered (-ffp-contract=off, no -ffast-math).
// Everything is in an unnamed namespace and no standard template is used: a shared inline function compiled here with
// AVX-512 could otherwise be the copy that the linker keeps for everybody.
#include "kernels.h"

#define DOS_CONCAT_(a, b) a##b
#define DOS_CONCAT(a, b) DOS_CONCAT_(a, b)

namespace dos {
namespace {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

// Which NaN comes out of an operation on two NaNs depends on the operand order that the compiler chose.
inline float canonical(float x) { return x == x ? x : float_of(0x7FC00000u); }

// Conversions: load gives a float, store takes a canonical one and rounds to nearest, ties to even.
struct Float32 {
  using Stored = float;
  static float load(float x) { return x; }
  static float store(float x) { return x; }
};

struct BFloat16 {
  using Stored = uint16_t;
  static float load(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }
  static uint16_t store(float x) {
    const uint32_t bits = bits_of(x);
    return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
  }
  // A tie, halfway between two bfloat16, moves one unit in the last place towards the even one, to
  // which store rounds; see adam.h.
  static float off_tie(float x) {
    const uint32_t bits = bits_of(x), last = bits & 0x1FFFFu;
    return float_of(bits - (last == 0x08000u ? 1u : 0u) + (last == 0x18000u ? 1u : 0u));
  }
  // As store, for what is no tie, in fewer operations.
  static uint16_t store_off_tie(float x) { return static_cast<uint16_t>((bits_of(x) + 0x8000u) >> 16); }
};

struct Float16 {
  using Stored = uint16_t;
  static float load(uint16_t h) {
    const uint32_t magnitude = h & 0x7FFFu;
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const float normal = float_of((magnitude << 13) + (112u << 23));
    const float denormal = float_of(magnitude | (126u << 23)) - 0.5f;  // magnitude * 2^-24
    const float special = float_of((magnitude << 13) | (255u << 23));
    const float x = magnitude < 0x0400u ? denormal : magnitude < 0x7C00u ? normal : special;
    return float_of(bits_of(x) | sign);
  }
  static uint16_t store(float x) {
    const uint32_t bits = bits_of(x);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    // Adding 0.5 aligns a value below 2^-14 so that the unit in its last place is 2^-24; the addition rounds.
    const uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - (126u << 23);
    const uint32_t normal = (magnitude - (112u << 23) + 0x0FFFu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t special = magnitude > (255u << 23) ? 0x7E00u : 0x7C00u;
    const uint32_t half = magnitude < (113u << 23) ? denormal : magnitude < 0x477FF000u ? normal : special;
    return static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u));
  }
};

struct None {
  using Stored = uint16_t;
};

// A float32 as its bfloat16 and a rest; see adam.h.
struct Split {
  using Stored = uint16_t;
  static float load(uint16_t upper, int16_t rest) {
    const int16_t least = static_cast<uint16_t>(upper + upper) == 0 ? 0 : -0x8000;
    const int16_t kept = rest > least ? rest : least;
    return float_of((static_cast<uint32_t>(upper) << 16) + static_cast<uint32_t>(static_cast<int32_t>(kept)));
  }
};

// Moments in codes of 8 bits, by blocks of kScaled elements that share a scale, as dos/kernels/codes.py
// defines them. The loops are apart, each of one kind of step, because compilers vectorise those.
struct Codes {
  static constexpr int64_t kTogether = 4;  // blocks, so that one does not wait for the scale of another

  static void decode(int64_t blocks, const int8_t* __restrict codes, const float* __restrict scales,
                     float* __restrict means) {
    for (int64_t b = 0; b < blocks; ++b) {
      const float scale = scales[b];
#pragma omp simd
      for (int64_t i = b * kScaled; i < (b + 1) * kScaled; ++i) means[i] = static_cast<float>(codes[i]) * scale;
    }
  }
  static void decode_squares(int64_t blocks, const uint8_t* __restrict codes, const float* __restrict scales,
                             float* __restrict squares) {
    for (int64_t b = 0; b < blocks; ++b) {
      const float scale = scales[b];
#pragma omp simd
      for (int64_t i = b * kScaled; i < (b + 1) * kScaled; ++i) {
        const float root = static_cast<float>(static_cast<int32_t>(codes[i]) + 1) * scale;
        squares[i] = root * root;
      }
    }
  }

  // 16 bits that say where rounding goes up, from the new moments, the step, and the place in the block.
  static uint16_t draw(float mean, float square, uint32_t salt) {
    return static_cast<uint16_t>(((bits_of(mean) ^ bits_of(square) ^ salt) * 0x9E3779B1u) >> 16);
  }
  static uint32_t salt(uint32_t seed, int64_t place) {
    return seed ^ static_cast<uint32_t>(place % kScaled) * 0x85EBCA6Bu;
  }

  // Writes codes and scales of what the update made of some blocks, which are `means` and the `roots` of the squares.
  static void encode(int64_t blocks, const float* __restrict means, const float* __restrict roots,
                     const uint16_t* __restrict drawn, int8_t* __restrict mean_codes, float* __restrict mean_scales,
                     uint8_t* __restrict root_codes, float* __restrict root_scales) {
    for (int64_t b = 0; b < blocks; ++b) {
      const uint32_t mean = largest<0x7FFFFFFFu>(means + b * kScaled), root = largest<~0u>(roots + b * kScaled);
      const bool finite = mean < kTooLarge && root < kInfinite;
      // Of 17 significant bits, so that a code times its scale is exact.
      const float scale = float_of((bits_of(float_of(mean) / 127.0f) + 0x7Fu) & ~0x7Fu);
      mean_scales[b] = finite ? (scale < kLeastScale ? 0.0f : scale) : float_of(kNan);
      root_scales[b] = finite ? float_of(root) * (1.0f / 256) : float_of(kNan);
    }
    for (int64_t b = 0; b < blocks; ++b, means += kScaled, roots += kScaled, drawn += kScaled,
                 mean_codes += kScaled, root_codes += kScaled) {
      if (root_scales[b] != root_scales[b]) {
        for (int64_t i = 0; i < kScaled; ++i) mean_codes[i] = 0, root_codes[i] = 0;
        continue;
      }
      // Levels in 128ths and in 4096ths, rounded to nearest, then down or up to a level. Adding 1.5 * 2**23
      // leaves what is below 1 to the rounding, and the number in the lowest bits.
      const float mean_factor = inverse(mean_scales[b], 128), root_factor = inverse(root_scales[b], 4096);
      uint16_t parts[kScaled];
      uint32_t levels[kScaled];
#pragma omp simd
      for (int64_t i = 0; i < kScaled; ++i) parts[i] = static_cast<uint16_t>(bits_of(means[i] * mean_factor + kShift));
#pragma omp simd
      for (int64_t i = 0; i < kScaled; ++i) {
        const uint16_t raised = static_cast<uint16_t>(parts[i] + (drawn[i] & 0x7Fu));
        mean_codes[i] = static_cast<int8_t>(static_cast<int16_t>(raised) >> 7);
      }
#pragma omp simd
      for (int64_t i = 0; i < kScaled; ++i) {
        const uint32_t level = (bits_of(roots[i] * root_factor + kShift) + (drawn[i] >> 4)) >> 12;
        levels[i] = (level > kZero ? level : kZero + 1) - 1;
      }
#pragma omp simd
      for (int64_t i = 0; i < kScaled; ++i) root_codes[i] = static_cast<uint8_t>(levels[i]);
    }
  }

 private:
  static constexpr uint32_t kInfinite = 0x7F800000u, kNan = 0x7FC00000u;
  static constexpr uint32_t kTooLarge = 0x7F7FFFF9u;  // means whose code times the scale overflows
  static constexpr float kLeastScale = 0x1p-120f;     // whose inverse is far from overflowing
  static constexpr float kShift = 0x1.8p23f;
  static constexpr uint32_t kZero = 0x4B400000u >> 12;  // a level of 0 after the shift; its lowest byte is 0

  // The bits of the largest magnitude, which are in the order of the magnitudes, any NaN above them.
  template <uint32_t kMask>
  static uint32_t largest(const float* __restrict values) {
    uint32_t most = 0;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < kScaled; ++i) {
      const uint32_t magnitude = bits_of(values[i]) & kMask;
      most = magnitude > most ? magnitude : most;
    }
    return most;
  }
  static float inverse(float scale, float parts) { return scale > 0 ? parts / scale : 0.0f; }
};

// Square roots and divisions fill the window in which the processor would find the next loads by itself, so the loops
// go block by block and ask for each array's lines ahead of time. Measured best at 64 and 512 elements.
constexpr int64_t kBlock = 64;
constexpr int64_t kAhead = 512;

// The lines of the block which is kAhead after `block`; past the end of the array this does nothing.
template <class T>
inline void prefetch(const T* array, int64_t block) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(array) + (block + kAhead) * sizeof(T);
  for (uintptr_t line = 0; line < kBlock * sizeof(T); line += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(address + line));
  }
}

inline int64_t end_of_block(int64_t block, int64_t end, int64_t size = kBlock) {
  return end - block < size ? end : block + size;
}

template <class Grad, class Param, class Out, bool kAmsgrad, bool kL2, bool kCodes>
void adam(const AdamArrays& arrays, const AdamScalars& scalars, int64_t begin, int64_t end) {
  const auto* __restrict grad = static_cast<const typename Grad::Stored*>(arrays.grad);
  auto* __restrict param = static_cast<typename Param::Stored*>(arrays.param);
  float* __restrict max_exp_avg_sq = arrays.max_exp_avg_sq;
  auto* __restrict out = static_cast<typename Out::Stored*>(arrays.out);
  int16_t* __restrict rest = arrays.rest;
  constexpr bool kSplit = __is_same(Param, Split);
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
      const int64_t part_end = end_of_block(part, stop);
#pragma omp simd
      for (int64_t i = part; i < part_end; ++i) {
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
          // Before canonical: after it, compilers make two cases of everything here, at twice the time.
          if constexpr (__is_same(Out, BFloat16)) p = BFloat16::off_tie(p);
          p = canonical(p);
          param[i] = Param::store(p);
          if constexpr (__is_same(Out, BFloat16)) {
            out[i] = BFloat16::store_off_tie(p);
          } else if constexpr (!__is_same(Out, None)) {
            out[i] = Out::store(p);
          }
        }
      }
    }
    if constexpr (kCodes) {
      Codes::encode(blocks, exp_avg, roots, drawn, mean_codes + block, arrays.exp_avg_scale + block / kScaled,
                    square_codes + block, arrays.exp_avg_sq_scale + block / kScaled);
    }
  }
}

template <class Src>
void accumulate_range(const void* src_, float* __restrict dst, bool overwrite, int64_t begin, int64_t end) {
  const auto* __restrict src = static_cast<const typename Src::Stored*>(src_);
  for (int64_t block = begin; block < end; block += kBlock) {
    prefetch(src, block);
    prefetch(dst, block);
    const int64_t stop = end_of_block(block, end);
    if (overwrite) {
#pragma omp simd
      for (int64_t i = block; i < stop; ++i) dst[i] = canonical(Src::load(src[i]));
    } else {
#pragma omp simd
      for (int64_t i = block; i < stop; ++i) dst[i] = canonical(dst[i] + Src::load(src[i]));
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

// From dtypes to types.
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

void accumulate_any(const void* src, DType src_type, float* dst, bool overwrite, int64_t begin, int64_t end) {
  with_type(src_type, [&](auto type) { accumulate_range<decltype(type)>(src, dst, overwrite, begin, end); });
}

double sum_of_squares_any(const void* src, DType src_type, int64_t begin, int64_t end) {
  return with_type(src_type, [&](auto type) { return sum_of_squares_range<decltype(type)>(src, begin, end); });
}

}  // namespace

extern const Kernels DOS_CONCAT(kernels_, DOS_ISA);
const Kernels DOS_CONCAT(kernels_, DOS_ISA) = {adam_any, accumulate_any, sum_of_squares_any};

}  // namespace dos
