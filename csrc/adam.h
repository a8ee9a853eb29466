// The contract of the CPU kernels: plain pointers and sizes, no SIMD, no Python.
//
// All results are identical to the bit for every instruction set, thread count, alignment and splitting of the range,
// and do not depend on the caller's floating-point environment (rounding mode, flushing of denormals).
// Every NaN written is the canonical quiet NaN. Arrays must not overlap.
//
// A master of a bfloat16 parameter is never a tie: where `out` is bfloat16 and the lower half of the
// new `param` comes out as exactly 0x8000, `param` moves one unit in the last place towards the
// value that `out` gets. So `out` and the lower half give `param` back:
// (out << 16 | lower) - (lower > 0x8000 ? 0x10000 : 0). A tie could not be given back, because it is
// rounded down from an even upper half and up from an odd one.
//
// With `rest` the master is kept split: `param` is the bfloat16 parameter, and `rest` the lower half.
// Read as a signed number, `rest` is the error of rounding, so the master is (param << 16) + rest, the
// same as above. Both are read, updated as one by the same rule, and written, in the same pass.
// A parameter that was set to 0 may have a negative rest from an earlier value; it counts as 0.
//
// With `takes_written()`, `out` has the parameter as the caller knows it. Where the old `param`, rounded, is another, user
// code has written to the parameter, and `param` first becomes that: the float16 or float32 itself; of a bfloat16 the
// upper half, and the lower one stays, as with `rest`.
#pragma once

#include <cstdint>

namespace dos {

enum class DType : int64_t { float32, bfloat16, float16 };

enum class Isa { portable, avx2, avx512 };

// One step of Adam, computed by the caller in double precision and rounded once.
struct AdamScalars {
  float grad_scale;                 // negative to maximize
  float l2;                         // weight decay added to the gradient; used if use_l2
  float decay;                      // 1 - lr * weight_decay when decoupled, else 1
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float inv_bias_correction2_sqrt;  // 1 / sqrt(1 - beta2^t)
  float eps;
  float step_size;                  // lr / (1 - beta1^t)
  bool use_l2;
  bool amsgrad;
  uint32_t seed;                    // of the step; moves the places where codes are rounded up
};

// Elements whose codes share a scale. Moments are in codes only where runs are whole blocks.
constexpr int64_t kScaled = 128;

struct AdamArrays {
  const void* grad;
  void* param;  // read and written
  void* exp_avg;          // float, or int8_t codes
  void* exp_avg_sq;       // float, or uint8_t codes
  float* max_exp_avg_sq;  // null if there is none; used with amsgrad
  void* out;              // copy of the new parameter, or null; requires a float32 param
  int16_t* rest;          // lower halves of the masters, or null; requires a bfloat16 param and no out
  float* exp_avg_scale;   // one for each kScaled elements, or null; both or none, without amsgrad
  float* exp_avg_sq_scale;
  DType grad_type;
  DType param_type;  // with `out` param is float32, and this says whether it takes over what was written: 0 or 1
  DType out_type;

  bool takes_written() const { return out && static_cast<int64_t>(param_type); }
};

// One run of elements, in 8-byte words: the rows of the table that dos/kernels/update.py keeps.
struct AdamRun {
  AdamArrays arrays;  // without a gradient the run is left as it is
  int64_t numel;
  int64_t step;  // the index of its scalars
};

// Updates `count` runs. `threads` >= 1 is an upper limit: few elements use fewer.
void adam_update(const AdamRun* runs, int64_t count, const AdamScalars* scalars, int threads, Isa isa);

// In double precision, summed in one fixed order.
double sum_of_squares(int64_t n, const void* src, DType src_type, int threads, Isa isa);

// Whether this build contains code for `isa` and this processor runs it.
bool supported(Isa isa);

}  // namespace dos
