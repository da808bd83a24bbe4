#include "comm/random_bits.hpp"

#include <sys/random.h>
#include <unistd.h>

#include <chrono>

namespace te_fl::comm {

uint64_t random_bits() noexcept {
  uint64_t bits = 0;
  if (::getrandom(&bits, sizeof bits, 0) == static_cast<ssize_t>(sizeof bits)) return bits;
  // A fallback for kernels without getrandom(). Still differs between threads of one machine at one
  // time.
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  return static_cast<uint64_t>(now) * 0x9E3779B97F4A7C15u ^ static_cast<uint64_t>(::gettid()) << 40;
}

}  // namespace te_fl::comm
