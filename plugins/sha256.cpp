#include "plugins/sha256.hpp"

#include <algorithm>
#include <bit>
#include <vector>

#include "plugins/byte_source.hpp"

namespace te_fl::plugins {
namespace {

constexpr std::uint64_t kPiece = 1 << 20;

// Fractional parts of the cube roots of the first 64 primes, FIPS 180-4, 4.2.2.
constexpr std::array<std::uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

}  // namespace

void Sha256::compress(const std::uint8_t* block) {
  std::array<std::uint32_t, 64> w;
  for (std::size_t t = 0; t < 16; ++t) {
    const std::uint8_t* p = block + 4 * t;
    w[t] = std::uint32_t{p[0]} << 24 | std::uint32_t{p[1]} << 16 | std::uint32_t{p[2]} << 8 | p[3];
  }
  for (std::size_t t = 16; t < 64; ++t) {
    const std::uint32_t a = w[t - 15];
    const std::uint32_t b = w[t - 2];
    const std::uint32_t s0 = std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3);
    const std::uint32_t s1 = std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10);
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (std::size_t t = 0; t < 64; ++t) {
    const std::uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const std::uint32_t choice = (e & f) ^ (~e & g);
    const std::uint32_t t1 = h + sum1 + choice + kRound[t] + w[t];
    const std::uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const std::uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + sum0 + majority;
  }
  const std::array<std::uint32_t, 8> add{a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < 8; ++i) state_[i] += add[i];
}

void Sha256::update(std::span<const std::uint8_t> bytes) {
  std::size_t held = length_ % block_.size();
  length_ += bytes.size();
  while (!bytes.empty()) {
    if (held == 0 && bytes.size() >= block_.size()) {
      compress(bytes.data());
      bytes = bytes.subspan(block_.size());
      continue;
    }
    const std::size_t take = std::min(bytes.size(), block_.size() - held);
    std::copy_n(bytes.begin(), take, block_.begin() + static_cast<std::ptrdiff_t>(held));
    bytes = bytes.subspan(take);
    held += take;
    if (held == block_.size()) {
      compress(block_.data());
      held = 0;
    }
  }
}

void Sha256::update(std::string_view text) {
  update(std::span(reinterpret_cast<const std::uint8_t*>(text.data()), text.size()));
}

std::array<std::uint8_t, 32> Sha256::digest() {
  const std::uint64_t bits = length_ * 8;
  const std::size_t held = length_ % block_.size();
  // A one bit, zeros up to 56 bytes into a block, then the length as a big-endian 64-bit number.
  std::vector<std::uint8_t> padding((held < 56 ? 56 : 120) - held + 8, 0);
  padding[0] = 0x80;
  for (std::size_t i = 0; i < 8; ++i) {
    padding[padding.size() - 1 - i] = static_cast<std::uint8_t>(bits >> (8 * i));
  }
  update(padding);
  std::array<std::uint8_t, 32> out;
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<std::uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
  }
  return out;
}

std::string Sha256::hex_digest() {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string out;
  for (const std::uint8_t byte : digest()) {
    out += kHex[byte >> 4];
    out += kHex[byte & 15];
  }
  return out;
}

FileHash sha256_of_file(const std::string& path) {
  FileHash out;
  const ByteSource file(path);
  if (file.state() != FileState::kRegular) {
    out.error = file.error();
    return out;
  }
  Sha256 hash;
  std::vector<std::uint8_t> piece;
  for (std::uint64_t at = 0; at < file.size(); at += piece.size()) {
    if (!file.read(at, std::min(kPiece, file.size() - at), piece)) {
      out.error = "changed or failed while it was being read";
      return out;
    }
    hash.update(piece);
  }
  out.hex = hash.hex_digest();
  return out;
}

}  // namespace te_fl::plugins
