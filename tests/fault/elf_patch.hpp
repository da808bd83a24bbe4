// Modifies copies of ELF libraries, to simulate damage or another machine's toolchain.
#pragma once

#include <elf.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

namespace te_fl::test {

inline Elf64_Shdr* section(std::string& bytes, uint32_t type) {
  auto* header = reinterpret_cast<Elf64_Ehdr*>(bytes.data());
  auto* sections = reinterpret_cast<Elf64_Shdr*>(bytes.data() + header->e_shoff);
  for (int i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type == type) return &sections[i];
  }
  ADD_FAILURE() << "the library has no section of type " << type;
  return nullptr;
}

// Returns the file offset after the last byte that a segment maps.
inline size_t end_of_segments(std::string& bytes) {
  auto* header = reinterpret_cast<Elf64_Ehdr*>(bytes.data());
  auto* segments = reinterpret_cast<Elf64_Phdr*>(bytes.data() + header->e_phoff);
  size_t end = 0;
  for (int i = 0; i < header->e_phnum; ++i) {
    if (segments[i].p_type == PT_LOAD) {
      end = std::max<size_t>(end, segments[i].p_offset + segments[i].p_filesz);
    }
  }
  return end;
}

inline uint32_t elf_hash(const char* name) {
  uint32_t h = 0;
  for (; *name != '\0'; ++name) {
    h = (h << 4) + static_cast<unsigned char>(*name);
    const uint32_t high = h & 0xf0000000u;
    h = (h ^ (high >> 24)) & ~high;
  }
  return h;
}

// Makes the library require GLIBC_2.99, in place of the first GLIBC_2.x whose name is long enough.
inline bool require_newer_glibc(std::string& bytes) {
  Elf64_Shdr* needs = section(bytes, SHT_GNU_verneed);
  if (needs == nullptr) return false;
  auto* header = reinterpret_cast<Elf64_Ehdr*>(bytes.data());
  auto* sections = reinterpret_cast<Elf64_Shdr*>(bytes.data() + header->e_shoff);
  char* names = bytes.data() + sections[needs->sh_link].sh_offset;
  char* at = bytes.data() + needs->sh_offset;
  for (uint32_t i = 0; i < needs->sh_info; ++i) {
    auto* need = reinterpret_cast<Elf64_Verneed*>(at);
    char* aux_at = at + need->vn_aux;
    for (int k = 0; k < need->vn_cnt; ++k) {
      auto* aux = reinterpret_cast<Elf64_Vernaux*>(aux_at);
      char* name = names + aux->vna_name;
      if (std::strncmp(name, "GLIBC_2.", 8) == 0 && std::strlen(name) >= 10) {
        std::memcpy(name, "GLIBC_2.99", 11);
        aux->vna_hash = elf_hash(name);
        return true;
      }
      aux_at += aux->vna_next;
    }
    at += need->vn_next;
  }
  ADD_FAILURE() << "the library names no version GLIBC_2.xx";
  return false;
}

}  // namespace te_fl::test
