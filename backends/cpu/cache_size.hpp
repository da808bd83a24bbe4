// The size of the processor's last-level cache.
#pragma once

#include <cstdint>

namespace te_fl::cpu {

// Bytes of the last-level cache that a core shares; 32 MiB if that cannot be found out. Reads a few
// files at the first call; any thread.
int64_t last_level_cache_bytes();

}  // namespace te_fl::cpu
