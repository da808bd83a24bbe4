#pragma once

#include <cstdint>

#include "te_fl/plugin.h"

// Philox 4x32 with 10 rounds (Salmon et al., SC11), and its use for dropout.
namespace te_fl::conformance {

struct PhiloxWords {
  uint32_t w[4];
};

inline PhiloxWords philox(uint64_t seed, uint64_t counter) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32), c2 = 0,
           c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = 0xD2511F53ull * c0, b = 0xCD9E8D57ull * c2;
    const uint32_t n0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0,
                   n2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(b), c3 = static_cast<uint32_t>(a), c0 = n0, c2 = n2;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// True if element i is kept at drop probability p.
inline bool keeps(const te_fl_rng& rng, int64_t i, float p) {
  const uint64_t seed = rng.seed_address == nullptr ? rng.seed : *rng.seed_address;
  const uint64_t offset = rng.offset + (rng.offset_address == nullptr ? 0 : *rng.offset_address);
  const uint32_t word = philox(seed, offset + static_cast<uint64_t>(i) / 4).w[i % 4];
  return static_cast<double>(word) * 0x1p-32 >= static_cast<double>(p);
}

}  // namespace te_fl::conformance
