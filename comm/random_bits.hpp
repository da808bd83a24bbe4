#pragma once

#include <cstdint>

namespace te_fl::comm {

// 64 bits that no other process and thread draws. Of the kernel; unlike std::random_device it needs
// no file and throws nothing.
uint64_t random_bits() noexcept;

}  // namespace te_fl::comm
