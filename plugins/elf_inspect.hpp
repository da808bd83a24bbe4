// Reads the metadata of a shared library without loading it.
//
// The functions depend only on the file's bytes. Files are untrusted: they may be truncated,
// corrupted or hostile. Every offset is checked, memory use is bounded by the file's size and by
// fixed limits, and no input causes a crash or an exception other than std::bad_alloc. Thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "plugins/elf_info.hpp"

namespace te_fl::plugins {

// Inspects the file at `path`.
ElfInfo inspect_elf(const std::string& path, ElfDepth depth = ElfDepth::kSymbols);
// Inspects an ELF file that is in memory.
ElfInfo inspect_elf(std::span<const std::uint8_t> bytes, ElfDepth depth = ElfDepth::kSymbols);

// "x86_64", "aarch64", ... for an e_machine value and word size.
std::string architecture_name(std::uint16_t machine, int bits, bool big_endian);
// The architecture that this process was compiled for, in the spelling of architecture_name().
std::string host_architecture();

}  // namespace te_fl::plugins
