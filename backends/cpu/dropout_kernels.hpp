// Dropout on chunks of a tensor: computes the saved mask from Philox random words, and applies the
// mask. A chunk must start at a multiple of 64 elements, so that no two chunks share a byte of the
// mask or a Philox block.
#pragma once

#include <cstdint>

namespace te_fl::cpu {

// Sets bit i (bit i % 8 of byte i / 8) if dropout keeps element i. The random words of the n
// elements start at Philox block `block` (see te_fl/numeric/philox.hpp). `threshold`: the result of
// dropout_threshold(), below 2^32. Bits beyond n are 0.
void keep_bits(uint64_t seed, uint64_t block, uint64_t threshold, int64_t n, uint8_t* bits);

// Adds x[i] * factor to acc[i] if bit i is set. x and acc must be padded (see convert.hpp); `bits`
// has n bits.
void add_kept(const float* x, const uint8_t* bits, float factor, int64_t n, float* acc);

}  // namespace te_fl::cpu
