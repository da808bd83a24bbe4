// te-fl check: finds the function of a plugin in which a crash happened.
#include <cxxabi.h>
#include <elf.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>

#include "check_parent.hpp"

namespace te_fl_tool::check {
namespace {

// The symbols of a 64-bit ELF file; none if the file is damaged or of another kind.
class Symbols {
 public:
  explicit Symbols(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
    const auto header = at<Elf64_Ehdr>(0);
    if (!header || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 ||
        header->e_ident[EI_CLASS] != ELFCLASS64)
      return;
    for (const unsigned kind : {SHT_SYMTAB, SHT_DYNSYM}) {
      for (unsigned i = 0; i < header->e_shnum && !table_; ++i) {
        const auto section = at<Elf64_Shdr>(header->e_shoff + i * sizeof(Elf64_Shdr));
        if (!section || section->sh_type != kind) continue;
        strings_ = at<Elf64_Shdr>(header->e_shoff + section->sh_link * sizeof(Elf64_Shdr));
        if (strings_) table_ = section;
      }
    }
  }

  // Returns the function that contains the address, and its start in `begin`; empty if there is
  // none.
  std::string function_at(uint64_t address, uint64_t& begin) const {
    const uint64_t count = table_ ? table_->sh_size / sizeof(Elf64_Sym) : 0;
    for (uint64_t i = 0; i < count; ++i) {
      const auto symbol = at<Elf64_Sym>(table_->sh_offset + i * sizeof(Elf64_Sym));
      if (!symbol) return {};
      const bool inside = ELF64_ST_TYPE(symbol->st_info) == STT_FUNC &&
                          address >= symbol->st_value &&
                          address < symbol->st_value + symbol->st_size;
      if (!inside) continue;
      const uint64_t name = strings_->sh_offset + symbol->st_name;
      if (name >= bytes_.size()) return {};
      begin = symbol->st_value;
      return std::string(bytes_.data() + name, strnlen(bytes_.data() + name, bytes_.size() - name));
    }
    return {};
  }

 private:
  template <class T>
  std::optional<T> at(uint64_t offset) const {
    if (offset > bytes_.size() || bytes_.size() - offset < sizeof(T)) return std::nullopt;
    T value;
    std::memcpy(&value, bytes_.data() + offset, sizeof value);
    return value;
  }

  std::vector<char> bytes_;
  std::optional<Elf64_Shdr> table_, strings_;
};

std::string readable(const std::string& name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status), std::free);
  std::string plain = status == 0 ? text.get() : name;
  if (plain.size() > 160) plain = plain.substr(0, 157) + "...";
  return plain;
}

}  // namespace

std::string code_at(const std::string& library, uint64_t offset) {
  const std::string file = std::filesystem::path(library).filename();
  char text[40];
  uint64_t begin = 0;
  const std::string function = Symbols(library).function_at(offset, begin);
  std::snprintf(text, sizeof text, "+0x%llx", static_cast<unsigned long long>(offset - begin));
  return function.empty() ? file + text : readable(function) + text + " (" + file + ")";
}

}  // namespace te_fl_tool::check
