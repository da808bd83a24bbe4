#pragma once

#include <cstdint>

namespace te_fl::comm {

// 64 random bits from the kernel, different in every process and thread. Unlike std::random_device
// it needs no file and does not throw.
uint64_t random_bits() noexcept;

}  // namespace te_fl::comm
