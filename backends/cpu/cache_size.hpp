// The size of the processor's last-level cache.
#pragma once

#include <cstdint>

namespace te_fl::cpu {

// Bytes of the last-level cache that a core can use; 32 MiB if unknown. The first call reads a few
// files. Thread-safe.
int64_t last_level_cache_bytes();

}  // namespace te_fl::cpu
