// Internal to plugins: reads the dynamic section of an ELF file.
#pragma once

#include <elf.h>

#include <vector>

#include "plugins/byte_source.hpp"
#include "plugins/elf_info.hpp"

namespace te_fl::plugins {

// Fills the members of `info` that come from the dynamic section (64-bit, native byte order). If
// the file is damaged, sets info.kind to kCorrupt and info.problem.
void read_elf_dynamic(const ByteSource& bytes, const Elf64_Ehdr& header,
                      const std::vector<Elf64_Phdr>& segments, ElfDepth depth, ElfInfo& info);

}  // namespace te_fl::plugins
