#include "plugins/elf_dynamic.hpp"

#include <algorithm>
#include <map>
#include <optional>

namespace te_fl::plugins {
namespace {

// Caps far above any real library, so that a forged count costs bounded time and memory.
constexpr std::uint64_t kMaxDynamicEntries = 16384;
constexpr std::uint64_t kMaxSymbols = 2'000'000;
constexpr std::uint64_t kMaxStringLength = 64 << 10;
constexpr std::uint64_t kMaxVersionBytes = 512 << 10;
constexpr unsigned kMaxVersions = 16384;
constexpr std::uint16_t kVersionIndexMask = 0x7fff;

std::vector<std::string> split_path_list(std::string_view text) {
  std::vector<std::string> out;
  while (true) {
    const std::size_t colon = text.find(':');
    out.emplace_back(text.substr(0, colon));
    if (colon == std::string_view::npos) return out;
    text.remove_prefix(colon + 1);
  }
}

// True for a global symbol that the file defines and other files can see.
bool is_exported(const Elf64_Sym& s) {
  const unsigned bind = ELF64_ST_BIND(s.st_info);
  const unsigned visibility = ELF64_ST_VISIBILITY(s.st_other);
  return s.st_shndx != SHN_UNDEF &&
         (bind == STB_GLOBAL || bind == STB_WEAK || bind == STB_GNU_UNIQUE) &&
         (visibility == STV_DEFAULT || visibility == STV_PROTECTED);
}

class DynamicReader {
 public:
  DynamicReader(const ByteSource& bytes, const Elf64_Ehdr& header,
                const std::vector<Elf64_Phdr>& segments, ElfInfo& info)
      : bytes_(bytes), header_(header), segments_(segments), info_(info) {}

  void read(ElfDepth depth) {
    if (!read_table() || !read_strings()) return;
    read_flags();
    if (!read_names() || !read_version_needs() || !read_version_definitions()) return;
    if (depth == ElfDepth::kSymbols) read_symbols();
  }

 private:
  struct Version {
    std::string name;
    std::string file;
  };

  bool corrupt(const std::string& what) {
    info_.kind = ElfKind::kCorrupt;
    info_.problem = "is damaged: " + what;
    return false;
  }

  // Maps an address to a file offset and the bytes that follow it in the same segment.
  bool locate(std::uint64_t address, std::uint64_t& offset, std::uint64_t& available) const {
    for (const Elf64_Phdr& s : segments_) {
      if (s.p_type != PT_LOAD || address < s.p_vaddr || address - s.p_vaddr >= s.p_filesz) continue;
      offset = s.p_offset + (address - s.p_vaddr);
      available = s.p_filesz - (address - s.p_vaddr);
      return true;
    }
    return false;
  }

  bool read_at(std::uint64_t address, std::uint64_t count, std::vector<std::uint8_t>& out) const {
    std::uint64_t offset = 0;
    std::uint64_t available = 0;
    return locate(address, offset, available) && count <= available &&
           bytes_.read(offset, count, out);
  }

  std::vector<std::uint8_t> read_up_to(std::uint64_t address, std::uint64_t count) const {
    std::uint64_t offset = 0;
    std::uint64_t available = 0;
    if (!locate(address, offset, available)) return {};
    return bytes_.read_some(offset, std::min(count, available));
  }

  bool read_table() {
    const auto it = std::find_if(segments_.begin(), segments_.end(),
                                 [](const Elf64_Phdr& s) { return s.p_type == PT_DYNAMIC; });
    if (it == segments_.end()) return corrupt("it has no dynamic section");
    const std::uint64_t count = it->p_filesz / sizeof(Elf64_Dyn);
    std::vector<std::uint8_t> raw;
    if (count > kMaxDynamicEntries || !bytes_.read(it->p_offset, count * sizeof(Elf64_Dyn), raw)) {
      return corrupt("its dynamic section lies outside the file");
    }
    Elf64_Dyn entry{};
    for (std::uint64_t i = 0; i < count && get_object(raw, i * sizeof(entry), entry); ++i) {
      if (entry.d_tag == DT_NULL) return true;
      if (entry.d_tag == DT_NEEDED) {
        needed_.push_back(entry.d_un.d_val);
      } else if (entry.d_tag == DT_AUXILIARY || entry.d_tag == DT_FILTER) {
        filters_.push_back(entry.d_un.d_val);
      } else {
        values_[entry.d_tag] = entry.d_un.d_val;
      }
    }
    return corrupt("its dynamic section has no end mark");
  }

  std::optional<std::uint64_t> value(std::int64_t tag) const {
    const auto it = values_.find(tag);
    return it == values_.end() ? std::nullopt : std::optional(it->second);
  }

  bool read_strings() {
    const auto address = value(DT_STRTAB);
    const auto size = value(DT_STRSZ);
    if (!address || !size) return corrupt("it has no dynamic string table");
    if (!read_at(*address, *size, strings_)) {
      return corrupt("its dynamic string table lies outside the file");
    }
    name_budget_ = 16 * strings_.size() + (1 << 20);
    return true;
  }

  // The string at `offset`; nullopt if it leaves the table or has no end. Also nullopt if the total
  // length of the names read exceeds any real file's, as with many symbols that share one long
  // name.
  std::optional<std::string_view> string_at(std::uint64_t offset) {
    if (offset >= strings_.size()) return std::nullopt;
    const auto* begin = reinterpret_cast<const char*>(strings_.data()) + offset;
    const std::size_t limit = std::min<std::uint64_t>(strings_.size() - offset, kMaxStringLength);
    const void* end = std::memchr(begin, 0, limit);
    if (end == nullptr) return std::nullopt;
    const auto length = static_cast<std::size_t>(static_cast<const char*>(end) - begin);
    if (!charge(length)) return std::nullopt;
    return std::string_view(begin, length);
  }

  bool charge(std::size_t length) {
    if (length > name_budget_) return false;
    name_budget_ -= length;
    return true;
  }

  void read_flags() {
    const std::uint64_t flags = value(DT_FLAGS).value_or(0);
    const std::uint64_t flags1 = value(DT_FLAGS_1).value_or(0);
    info_.text_relocations = value(DT_TEXTREL).has_value() || (flags & DF_TEXTREL) != 0;
    info_.static_tls = (flags & DF_STATIC_TLS) != 0;
    info_.no_dlopen = (flags1 & DF_1_NOOPEN) != 0;
    if (flags1 & DF_1_PIE) {
      info_.kind = ElfKind::kExecutable;
      info_.problem = "is a position-independent executable for " + info_.architecture +
                      ", not a shared library";
    }
  }

  bool read_names() {
    for (const std::uint64_t offset : needed_) {
      const auto name = string_at(offset);
      if (!name || name->empty()) return corrupt("the name of a needed library is unreadable");
      info_.needed.emplace_back(*name);
    }
    for (const std::uint64_t offset : filters_) {
      const auto name = string_at(offset);
      if (!name || name->empty()) return corrupt("the name of a filter is unreadable");
      info_.filters.emplace_back(*name);
    }
    const auto text = [this](std::int64_t tag, auto&& use) {
      const auto offset = value(tag);
      if (!offset) return true;
      const auto s = string_at(*offset);
      if (s) use(*s);
      return s.has_value();
    };
    if (!text(DT_SONAME, [&](std::string_view s) { info_.soname = s; }) ||
        !text(DT_RPATH, [&](std::string_view s) { info_.rpath = split_path_list(s); }) ||
        !text(DT_RUNPATH, [&](std::string_view s) { info_.runpath = split_path_list(s); })) {
      return corrupt("its SONAME, RPATH or RUNPATH is unreadable");
    }
    return true;
  }

  bool read_version_needs() {
    const auto address = value(DT_VERNEED);
    if (!address) return true;
    const std::vector<std::uint8_t> raw = read_up_to(*address, kMaxVersionBytes);
    const std::uint64_t files = value(DT_VERNEEDNUM).value_or(0);
    std::uint64_t at = 0;
    unsigned total = 0;
    for (std::uint64_t i = 0; i < files; ++i) {
      Elf64_Verneed need{};
      if (!get_object(raw, at, need)) return corrupt("its version requirements are unreadable");
      const auto file = string_at(need.vn_file);
      std::uint64_t aux_at = at + need.vn_aux;
      for (unsigned k = 0; k < need.vn_cnt; ++k) {
        Elf64_Vernaux aux{};
        if (++total > kMaxVersions || !get_object(raw, aux_at, aux)) {
          return corrupt("its version requirements are unreadable");
        }
        const auto name = string_at(aux.vna_name);
        if (!file || !name || !charge(file->size())) {
          return corrupt("a version requirement has no name");
        }
        info_.version_needs.push_back(
            {std::string(*file), std::string(*name), (aux.vna_flags & VER_FLG_WEAK) != 0});
        versions_[aux.vna_other & kVersionIndexMask] = {std::string(*name), std::string(*file)};
        if (aux.vna_next == 0) break;
        aux_at += aux.vna_next;
      }
      if (need.vn_next == 0 || ++total > kMaxVersions) break;
      at += need.vn_next;
    }
    return true;
  }

  bool read_version_definitions() {
    const auto address = value(DT_VERDEF);
    if (!address) return true;
    const std::vector<std::uint8_t> raw = read_up_to(*address, kMaxVersionBytes);
    const std::uint64_t count = value(DT_VERDEFNUM).value_or(0);
    std::uint64_t at = 0;
    for (std::uint64_t i = 0; i < count && i < kMaxVersions; ++i) {
      Elf64_Verdef def{};
      Elf64_Verdaux aux{};
      if (!get_object(raw, at, def) || !get_object(raw, at + def.vd_aux, aux)) {
        return corrupt("its version definitions are unreadable");
      }
      const auto name = string_at(aux.vda_name);
      if (!name) return corrupt("a version definition has no name");
      if (!(def.vd_flags & VER_FLG_BASE)) {
        info_.version_definitions.emplace_back(*name);
        versions_[def.vd_ndx & kVersionIndexMask] = {std::string(*name), {}};
      }
      if (def.vd_next == 0) break;
      at += def.vd_next;
    }
    return true;
  }

  // Number of entries in the dynamic symbol table. The format does not store it: it follows from
  // the hash tables, or from the section header if a library exports nothing.
  std::uint64_t symbol_count(std::uint64_t table_address) const {
    std::uint64_t count = 0;
    if (const auto address = value(DT_HASH)) {
      const std::vector<std::uint8_t> raw = read_up_to(*address, 8);
      std::uint32_t chains = 0;
      if (get_object(raw, 4, chains)) count = chains;
    }
    if (const auto address = value(DT_GNU_HASH)) count = std::max(count, gnu_hash_count(*address));
    return std::max(count, section_count(table_address));
  }

  std::uint64_t gnu_hash_count(std::uint64_t address) const {
    struct {
      std::uint32_t buckets, first, bloom, shift;
    } head{};
    const std::vector<std::uint8_t> raw = read_up_to(address, sizeof(head));
    if (!get_object(raw, 0, head)) return 0;
    const std::uint64_t buckets_at = address + sizeof(head) + std::uint64_t{head.bloom} * 8;
    std::vector<std::uint8_t> buckets;
    if (!read_at(buckets_at, std::uint64_t{head.buckets} * 4, buckets)) return head.first;
    std::uint32_t last = 0;
    std::uint32_t bucket = 0;
    for (std::uint64_t i = 0; get_object(buckets, i, bucket); i += 4) last = std::max(last, bucket);
    if (last < head.first) return head.first;  // no exports
    const std::uint64_t chains_at = buckets_at + std::uint64_t{head.buckets} * 4;
    for (std::uint64_t index = last; index < kMaxSymbols;) {
      const auto chunk = read_up_to(chains_at + (index - head.first) * 4, 4096);
      std::uint32_t hash = 0;
      if (!get_object(chunk, 0, hash)) return index;
      for (std::uint64_t i = 0; get_object(chunk, i, hash); i += 4) {
        ++index;
        if (hash & 1) return index;  // end of the last chain
      }
    }
    return kMaxSymbols + 1;
  }

  std::uint64_t section_count(std::uint64_t table_address) const {
    std::vector<std::uint8_t> raw;
    const std::uint64_t size = std::uint64_t{header_.e_shnum} * sizeof(Elf64_Shdr);
    if (header_.e_shoff == 0 || header_.e_shnum == 0) return 0;
    if (header_.e_shentsize != sizeof(Elf64_Shdr) || !bytes_.read(header_.e_shoff, size, raw)) {
      info_.warnings.push_back(
          "its section headers lie past the end of the file: the copy may be incomplete");
      return 0;
    }
    Elf64_Shdr section{};
    for (std::uint64_t at = 0; get_object(raw, at, section); at += sizeof(section)) {
      if (section.sh_type == SHT_DYNSYM && section.sh_addr == table_address) {
        return section.sh_size / sizeof(Elf64_Sym);
      }
    }
    return 0;
  }

  bool read_symbols() {
    const auto address = value(DT_SYMTAB);
    if (!address) return corrupt("it has no dynamic symbol table");
    const std::uint64_t count = symbol_count(*address);
    if (count > kMaxSymbols) return corrupt("its dynamic symbol table is larger than any real one");
    std::vector<std::uint8_t> table;
    if (count > 0 && !read_at(*address, count * sizeof(Elf64_Sym), table)) {
      return corrupt("its dynamic symbol table lies outside the file");
    }
    std::vector<std::uint8_t> indices;
    const auto versym = value(DT_VERSYM);
    if (versym && !read_at(*versym, count * 2, indices)) {
      return corrupt("its symbol versions lie outside the file");
    }
    bool readable = true;
    for (std::uint64_t i = 1; i < count && readable; ++i) readable = read_symbol(table, indices, i);
    // Sorted also if reading stopped early, since look-ups rely on the order.
    std::sort(info_.defined.begin(), info_.defined.end(),
              [](const ElfSymbol& a, const ElfSymbol& b) { return a.name < b.name; });
    if (!readable) return corrupt("a symbol's name is unreadable");
    return true;
  }

  bool read_symbol(const std::vector<std::uint8_t>& table, const std::vector<std::uint8_t>& indices,
                   std::uint64_t i) {
    Elf64_Sym raw{};
    if (!get_object(table, i * sizeof(raw), raw)) return false;
    const bool undefined = raw.st_shndx == SHN_UNDEF;
    if (undefined ? raw.st_name == 0 || ELF64_ST_BIND(raw.st_info) == STB_LOCAL
                  : !is_exported(raw)) {
      return true;
    }
    const auto name = string_at(raw.st_name);
    if (!name) return false;
    ElfSymbol symbol;
    symbol.name = *name;
    symbol.weak = ELF64_ST_BIND(raw.st_info) == STB_WEAK;
    symbol.function = ELF64_ST_TYPE(raw.st_info) == STT_FUNC;
    std::uint16_t index = 0;
    if (get_object(indices, i * 2, index)) {
      const auto version = versions_.find(index & kVersionIndexMask);
      if (version != versions_.end()) {
        if (!charge(version->second.name.size() + version->second.file.size())) return false;
        symbol.version = version->second.name;
        symbol.version_file = version->second.file;
      }
    }
    if (ELF64_ST_BIND(raw.st_info) == STB_GNU_UNIQUE) info_.unique.push_back(symbol.name);
    (undefined ? info_.undefined : info_.defined).push_back(std::move(symbol));
    return true;
  }

  const ByteSource& bytes_;
  const Elf64_Ehdr& header_;
  const std::vector<Elf64_Phdr>& segments_;
  ElfInfo& info_;
  std::map<std::int64_t, std::uint64_t> values_;
  std::vector<std::uint64_t> needed_, filters_;
  std::vector<std::uint8_t> strings_;
  std::uint64_t name_budget_ = 0;
  std::map<std::uint16_t, Version> versions_;
};

}  // namespace

void read_elf_dynamic(const ByteSource& bytes, const Elf64_Ehdr& header,
                      const std::vector<Elf64_Phdr>& segments, ElfDepth depth, ElfInfo& info) {
  DynamicReader(bytes, header, segments, info).read(depth);
}

}  // namespace te_fl::plugins
