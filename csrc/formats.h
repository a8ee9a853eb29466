// The stored types of parameters, gradients and moments, and their conversions to float.
// All in an unnamed namespace, for the reason that kernels.cpp gives.
#pragma once

#include "kernels.h"

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

// The result of an operation on two NaNs depends on the operand order that the compiler chose.
inline float canonical(float x) { return x == x ? x : float_of(0x7FC00000u); }

// Conversions: load returns a float, store takes a canonical one and rounds to nearest, ties to even; taken returns a
// master that user code has replaced by a parameter of this type.
struct Float32 {
  using Stored = float;
  static float load(float x) { return x; }
  static float store(float x) { return x; }
  static float taken(float, float x) { return x; }
};

struct BFloat16 {
  using Stored = uint16_t;
  static float taken(float master, uint16_t h) { return with_rest(h, static_cast<int16_t>(bits_of(master))); }
  // See adam.h, also for 0.
  static float with_rest(uint16_t upper, int16_t rest) {
    const int16_t least = static_cast<uint16_t>(upper + upper) == 0 ? 0 : -0x8000;
    const int16_t kept = rest > least ? rest : least;
    return float_of((static_cast<uint32_t>(upper) << 16) + static_cast<uint32_t>(static_cast<int32_t>(kept)));
  }
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
  // As store, for values that are no ties, in fewer operations.
  static uint16_t store_off_tie(float x) { return static_cast<uint16_t>((bits_of(x) + 0x8000u) >> 16); }
};

struct Float16 {
  using Stored = uint16_t;
  static float taken(float, uint16_t h) { return load(h); }
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
  static float load(uint16_t upper, int16_t rest) { return BFloat16::with_rest(upper, rest); }
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

  static constexpr uint32_t kSpread = 0x9E3779B1u;

  // 16 random bits for rounding up or down, from the new moments, the step, and the place in the block.
  static uint16_t draw(float mean, float square, uint32_t salt) {
    return static_cast<uint16_t>(((bits_of(mean) ^ bits_of(square) ^ salt) * kSpread) >> 16);
  }
  static uint32_t salt(uint32_t seed, int64_t place) {
    return seed ^ static_cast<uint32_t>(place % kScaled) * 0x85EBCA6Bu;
  }

  // Scales of blocks from the bits of their largest magnitudes.
  static void scales(int64_t blocks, const uint32_t* __restrict means, const uint32_t* __restrict roots,
                     float* __restrict mean_scales, float* __restrict root_scales) {
#pragma omp simd
    for (int64_t b = 0; b < blocks; ++b) {
      const bool finite = (means[b] < kTooLarge) & (roots[b] < kInfinite);
      // Of 17 significant bits, so that a code times its scale is exact.
      const float scale = float_of((bits_of(float_of(means[b]) / 127.0f) + 0x7Fu) & ~0x7Fu);
      mean_scales[b] = finite ? (scale < kLeastScale ? 0.0f : scale) : float_of(kNan);
      root_scales[b] = finite ? float_of(roots[b]) * (1.0f / 256) : float_of(kNan);
    }
  }
  // The number of 128ths and 4096ths of a level in 1; 0 where the scale is 0 or NaN.
  static float mean_factor(float scale) { return inverse(scale, 128); }
  static float root_factor(float scale) { return inverse(scale, 4096); }

  // Writes codes and scales of the new moments of some blocks: `means`, and the `roots` of the squares.
  static void encode(int64_t blocks, const float* __restrict means, const float* __restrict roots,
                     const uint16_t* __restrict drawn, int8_t* __restrict mean_codes, float* __restrict mean_scales,
                     uint8_t* __restrict root_codes, float* __restrict root_scales) {
    for (int64_t b = 0; b < blocks; ++b) {
      const uint32_t mean = largest<0x7FFFFFFFu>(means + b * kScaled), root = largest<~0u>(roots + b * kScaled);
      scales(1, &mean, &root, mean_scales + b, root_scales + b);
    }
    for (int64_t b = 0; b < blocks; ++b, means += kScaled, roots += kScaled, drawn += kScaled,
                 mean_codes += kScaled, root_codes += kScaled) {
      if (root_scales[b] != root_scales[b]) {
        for (int64_t i = 0; i < kScaled; ++i) mean_codes[i] = 0, root_codes[i] = 0;
        continue;
      }
      // Levels in 128ths and in 4096ths, rounded to nearest, then down or up to a level. Adding 1.5 * 2**23
      // rounds away the fraction, and has the number in the lowest bits.
      const float mean_to_parts = mean_factor(mean_scales[b]), root_to_parts = root_factor(root_scales[b]);
      uint16_t parts[kScaled];
      uint32_t levels[kScaled];
#pragma omp simd
      for (int64_t i = 0; i < kScaled; ++i) {
        parts[i] = static_cast<uint16_t>(bits_of(means[i] * mean_to_parts + kShift));
      }
#pragma omp simd
      for (int64_t i = 0; i < kScaled; ++i) {
        const uint16_t raised = static_cast<uint16_t>(parts[i] + (drawn[i] & 0x7Fu));
        mean_codes[i] = static_cast<int8_t>(static_cast<int16_t>(raised) >> 7);
      }
#pragma omp simd
      for (int64_t i = 0; i < kScaled; ++i) {
        const uint32_t level = (bits_of(roots[i] * root_to_parts + kShift) + (drawn[i] >> 4)) >> 12;
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

  // The bits of the largest magnitude. Bits sort as magnitudes do, any NaN above all.
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

}  // namespace
}  // namespace dos
