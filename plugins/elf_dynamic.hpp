// Internal to plugins: the part of the ELF reader behind the program headers.
#pragma once

#include <elf.h>

#include <vector>

#include "plugins/byte_source.hpp"
#include "plugins/elf_info.hpp"

namespace te_fl::plugins {

// Fills the dynamic section's part of `info` (64-bit, native byte order). On damage sets
// info.kind to kCorrupt and info.problem.
void read_elf_dynamic(const ByteSource& bytes, const Elf64_Ehdr& header,
                      const std::vector<Elf64_Phdr>& segments, ElfDepth depth, ElfInfo& info);

}  // namespace te_fl::plugins
