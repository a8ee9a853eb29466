// Loops work block by block and prefetch the memory of later blocks.
#pragma once

#include "kernels.h"

namespace dos {
namespace {

// Square roots and divisions fill the processor's queue, in which it would find the next loads by itself, so the loops
// prefetch each array's lines. Measured best at 64 and 512 elements.
constexpr int64_t kBlock = 64;
constexpr int64_t kAhead = 512;

// Prefetches the lines of the block that is kAhead after `block`; past the end of the array this has no effect.
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

}  // namespace
}  // namespace dos
