// The counter-based random stream of dropout: Philox 4x32-10 (Salmon, Moraes, Dror and Shaw,
// "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). Any element's word can be computed
// alone, so a mask does not depend on thread count or traversal order.
#pragma once

#include <array>
#include <cstdint>

namespace te_fl::numeric {

inline constexpr int kPhiloxRounds = 10;
using PhiloxKey = std::array<std::uint32_t, 2>;
using PhiloxWords = std::array<std::uint32_t, 4>;

// One round; those that follow each other take keys that philox_next() leads to.
constexpr PhiloxWords philox_round(const PhiloxWords& words, const PhiloxKey& key) {
  const std::uint64_t product0 = std::uint64_t{0xD2511F53u} * words[0];
  const std::uint64_t product1 = std::uint64_t{0xCD9E8D57u} * words[2];
  return {static_cast<std::uint32_t>(product1 >> 32) ^ words[1] ^ key[0],
          static_cast<std::uint32_t>(product1),
          static_cast<std::uint32_t>(product0 >> 32) ^ words[3] ^ key[1],
          static_cast<std::uint32_t>(product0)};
}
constexpr PhiloxKey philox_next(const PhiloxKey& key) {
  return {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
}

// One Philox 4x32-10 block: four 32-bit words for a 128-bit counter under a 64-bit key, least
// significant word first.
constexpr PhiloxWords philox4x32_10(PhiloxWords counter, PhiloxKey key) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    counter = philox_round(counter, key);
    key = philox_next(key);
  }
  return counter;
}

// The key is the low and high half of a seed.
constexpr PhiloxKey philox_key(std::uint64_t seed) {
  return {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
}
// The low words hold `counter` and the high words 0.
constexpr PhiloxWords philox_counter(std::uint64_t counter) {
  return {static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32), 0u, 0u};
}

// The block at `counter` (= offset + i / 4 for element i, modulo 2^64) under `seed`.
constexpr PhiloxWords philox4x32(std::uint64_t seed, std::uint64_t counter) {
  return philox4x32_10(philox_counter(counter), philox_key(seed));
}

// The word of element i (row-major, logical index) of a tensor: word i mod 4 of block offset + i/4.
// For runs of elements call philox4x32 once per four.
constexpr std::uint32_t dropout_word(std::uint64_t seed, std::uint64_t offset, std::uint64_t i) {
  return philox4x32(seed, offset + i / 4)[i % 4];
}

// The smallest word that is kept at drop probability p: ceil(p * 2^32), from 0 (p <= 0: keep all)
// to 2^32 (p >= 1 or NaN: drop all, which is why it takes 64 bits).
constexpr std::uint64_t dropout_threshold(float p) {
  if (p <= 0.0f) return 0;
  if (!(p < 1.0f)) return std::uint64_t{1} << 32;
  const double scaled = static_cast<double>(p) * 4294967296.0;  // exact: a power of two
  const auto floor = static_cast<std::uint64_t>(scaled);
  return static_cast<double>(floor) < scaled ? floor + 1 : floor;
}

// Keep iff word * 2^-32 >= p, decided in integers: in FP32 the word would be rounded first, and
// words just below p * 2^32 would be kept. Hoist dropout_threshold(p) out of loops.
constexpr bool dropout_keep(std::uint32_t word, float p) { return word >= dropout_threshold(p); }

}  // namespace te_fl::numeric
