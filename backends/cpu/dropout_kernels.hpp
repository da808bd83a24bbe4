// Dropout on chunks: computes the saved mask from the random stream, and applies it. A chunk must
// start at a multiple of 64 elements, so that chunks share neither bytes of the mask nor blocks of
// the stream.
#pragma once

#include <cstdint>

namespace te_fl::cpu {

// Sets bit i (bit i % 8 of byte i / 8) if dropout keeps element i. The words of the n elements
// start at block `block` of the stream (see te_fl/numeric/philox.hpp). `threshold`: of
// dropout_threshold(), below 2^32. Bits beyond n are 0.
void keep_bits(uint64_t seed, uint64_t block, uint64_t threshold, int64_t n, uint8_t* bits);

// acc += x * factor where the bit is set. Both must be padded (see convert.hpp); `bits` has n
// elements.
void add_kept(const float* x, const uint8_t* bits, float factor, int64_t n, float* acc);

}  // namespace te_fl::cpu
