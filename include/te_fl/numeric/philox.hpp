// The counter-based random number generator of dropout: Philox 4x32-10 (Salmon, Moraes, Dror and
// Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). Each element's random word is
// computed independently, so a mask does not depend on thread count or traversal order.
#pragma once

#include <array>
#include <cstdint>

namespace te_fl::numeric {

inline constexpr int kPhiloxRounds = 10;
using PhiloxKey = std::array<std::uint32_t, 2>;
using PhiloxWords = std::array<std::uint32_t, 4>;

// One round of Philox 4x32. philox_next() computes the key of the following round.
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

// One Philox 4x32-10 block: maps a 128-bit counter and a 64-bit key to four 32-bit words. Counter
// and key are given with the least significant word first.
constexpr PhiloxWords philox4x32_10(PhiloxWords counter, PhiloxKey key) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    counter = philox_round(counter, key);
    key = philox_next(key);
  }
  return counter;
}

// Splits a seed into the two words of a key, low half first.
constexpr PhiloxKey philox_key(std::uint64_t seed) {
  return {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
}
// A 128-bit counter whose low half is `counter` and whose high half is 0.
constexpr PhiloxWords philox_counter(std::uint64_t counter) {
  return {static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32), 0u, 0u};
}

// The four random words at `counter` under `seed`. Element i of a tensor uses counter offset + i /
// 4, modulo 2^64.
constexpr PhiloxWords philox4x32(std::uint64_t seed, std::uint64_t counter) {
  return philox4x32_10(philox_counter(counter), philox_key(seed));
}

// The random word of element i (row-major index) of a tensor: word i mod 4 of the block at offset +
// i / 4. To process consecutive elements, call philox4x32 once per four elements instead.
constexpr std::uint32_t dropout_word(std::uint64_t seed, std::uint64_t offset, std::uint64_t i) {
  return philox4x32(seed, offset + i / 4)[i % 4];
}

// The smallest random word that is kept at drop probability p: ceil(p * 2^32). 0 for p <= 0 (keep
// all); 2^32 for p >= 1 or NaN (drop all), which needs a 64-bit result.
constexpr std::uint64_t dropout_threshold(float p) {
  if (p <= 0.0f) return 0;
  if (!(p < 1.0f)) return std::uint64_t{1} << 32;
  const double scaled = static_cast<double>(p) * 4294967296.0;  // exact: a power of two
  const auto floor = static_cast<std::uint64_t>(scaled);
  return static_cast<double>(floor) < scaled ? floor + 1 : floor;
}

// Keeps an element iff word * 2^-32 >= p. The comparison uses integers, because in FP32 words just
// below p * 2^32 would be rounded up and kept. Hoist dropout_threshold(p) out of loops.
constexpr bool dropout_keep(std::uint32_t word, float p) { return word >= dropout_threshold(p); }

}  // namespace te_fl::numeric
