// Reads what a shared library says about itself, without opening it through the dynamic loader.
//
// Everything here is a pure function of the file's bytes. Files are untrusted: they may be
// truncated, corrupted or hostile. Every offset is checked, memory is bounded by the file's size
// and by fixed caps, and no input makes these functions throw (apart from std::bad_alloc) or crash.
// Thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "plugins/elf_info.hpp"

namespace te_fl::plugins {

// Inspects the file at `path`.
ElfInfo inspect_elf(const std::string& path, ElfDepth depth = ElfDepth::kSymbols);
// Inspects bytes in memory.
ElfInfo inspect_elf(std::span<const std::uint8_t> bytes, ElfDepth depth = ElfDepth::kSymbols);

// "x86_64", "aarch64", ... for an e_machine value and word size.
std::string architecture_name(std::uint16_t machine, int bits, bool big_endian);
// The architecture that this process was compiled for, in the same spelling.
std::string host_architecture();

}  // namespace te_fl::plugins
