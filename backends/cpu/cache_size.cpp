#include "cache_size.hpp"

#include <atomic>
#include <fstream>
#include <string>

namespace te_fl::cpu {
namespace {

// Does not use sysconf(_SC_LEVEL3_CACHE_SIZE): on AMD processors the C library returns the sum over
// all core complexes of a socket, but a core can use only its own complex's cache.
int64_t read_sizes() {
  int64_t last = int64_t{32} << 20;
  for (int index = 0; index < 8; ++index) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) +
                       "/size");
    int64_t size = 0;
    char unit = 0;
    if (!(file >> size)) break;
    file >> unit;
    if (size > 0) last = size << (unit == 'K' ? 10 : unit == 'M' ? 20 : unit == 'G' ? 30 : 0);
  }
  return last;
}

}  // namespace

int64_t last_level_cache_bytes() {
  static std::atomic<int64_t> known{0};  // not a guarded static: a fork might interrupt its
                                         // initialisation
  int64_t size = known.load(std::memory_order_relaxed);
  if (size == 0) {
    size = read_sizes();
    known.store(size, std::memory_order_relaxed);
  }
  return size;
}

}  // namespace te_fl::cpu
