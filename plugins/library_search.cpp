#include "plugins/library_search.hpp"

#include <elf.h>
#include <link.h>
#include <sys/auxv.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>

#include "plugins/byte_source.hpp"

namespace te_fl::plugins {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kOldMagic = "ld.so-1.7.0";
constexpr std::string_view kNewMagic = "glibc-ld.so.cache1.1";
constexpr std::uint64_t kMaxCacheBytes = 32 << 20;
constexpr std::uint64_t kNewHeaderBytes = 48;
constexpr std::uint64_t kNewEntryBytes = 24;
constexpr std::uint64_t kOldHeaderBytes = 16;
constexpr std::uint64_t kOldEntryBytes = 12;

std::string multiarch() {
#if defined(__powerpc64__)
  return "powerpc64le-linux-gnu";
#else
  return host_architecture() + "-linux-gnu";
#endif
}

// The SONAME of a mapped object, from its dynamic section in memory.
std::string mapped_soname(const dl_phdr_info& object) {
  for (int i = 0; i < object.dlpi_phnum; ++i) {
    if (object.dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    const auto* entry =
        reinterpret_cast<const ElfW(Dyn)*>(object.dlpi_addr + object.dlpi_phdr[i].p_vaddr);
    std::optional<std::uintptr_t> strings;
    std::optional<std::uintptr_t> soname;
    for (; entry->d_tag != DT_NULL; ++entry) {
      if (entry->d_tag == DT_STRTAB) strings = entry->d_un.d_ptr;
      if (entry->d_tag == DT_SONAME) soname = entry->d_un.d_val;
    }
    if (!strings || !soname) return {};
    // On some architectures glibc relocates this pointer in place, on others it does not.
    if (*strings < object.dlpi_addr) *strings += object.dlpi_addr;
    return reinterpret_cast<const char*>(*strings + *soname);
  }
  return {};
}

std::vector<std::string> split_folders(std::string_view text, std::string_view separators) {
  std::vector<std::string> out;
  while (!text.empty()) {
    const std::size_t end = text.find_first_of(separators);
    const std::string_view part = text.substr(0, end);
    out.emplace_back(part.empty() ? "." : part);
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
  return out;
}

// The value of LD_LIBRARY_PATH when the program started. The dynamic loader reads it only at that
// time.
std::string starting_library_path() {
  if (getauxval(AT_SECURE) != 0) return {};
  constexpr std::string_view kName = "LD_LIBRARY_PATH=";
  std::ifstream environment("/proc/self/environ", std::ios::binary);
  if (!environment) {
    const char* value = std::getenv("LD_LIBRARY_PATH");
    return value ? value : "";
  }
  for (std::string entry; std::getline(environment, entry, '\0');) {
    if (entry.starts_with(kName)) return entry.substr(kName.size());
  }
  return {};
}

std::optional<std::string> c_string_at(std::span<const std::uint8_t> bytes, std::uint64_t offset) {
  if (offset >= bytes.size()) return std::nullopt;
  const auto* begin = reinterpret_cast<const char*>(bytes.data()) + offset;
  const std::size_t limit = std::min<std::uint64_t>(bytes.size() - offset, 4096);
  const void* end = std::memchr(begin, 0, limit);
  if (end == nullptr) return std::nullopt;
  return std::string(begin, static_cast<const char*>(end));
}

std::string absolute_folder(const std::string& library_path) {
  std::error_code error;
  const fs::path absolute = fs::absolute(library_path, error);
  return error ? std::string(".") : absolute.parent_path().string();
}

std::string join(const std::string& folder, const std::string& name) {
  return folder.ends_with('/') ? folder + name : folder + '/' + name;
}

// Tries one file as the library. Returns true if the search ends with this file.
bool try_file(const std::string& path, FoundLibrary& found) {
  ElfInfo elf = inspect_elf(path, ElfDepth::kHeaders);
  if (elf.kind == ElfKind::kMissing) return false;
  found.met.push_back(path);
  if (!found.path.empty()) return true;  // a hwcaps variant was found before
  if (!elf.sound()) {
    if (!found.rejected.empty()) found.rejected += "; ";
    found.rejected += path + " " + elf.problem;
    return false;
  }
  found.path = path;
  found.elf = std::move(elf);
  return true;
}

bool try_folders(const std::vector<std::string>& folders, const std::string& owner,
                 const std::string& name, FoundLibrary& found) {
  return std::any_of(folders.begin(), folders.end(), [&](const std::string& folder) {
    std::string expanded = owner.empty() ? folder : expand_tokens(folder, owner);
    if (expanded.empty()) expanded = ".";
    if (!owner.empty()) found.run_path_folders.push_back(expanded);
    for (const std::string& twin : hwcaps_folders(expanded)) try_file(join(twin, name), found);
    try_file(join(expanded, name), found);
    return !found.path.empty();
  });
}

bool find_loaded(const std::string& name, const SearchRules& rules, FoundLibrary& found) {
  const auto it =
      std::find_if(rules.loaded.begin(), rules.loaded.end(), [&](const LoadedLibrary& l) {
        return l.soname == name || l.path == name ||
               (name.find('/') == name.npos && fs::path(l.path).filename() == name);
      });
  if (it == rules.loaded.end()) return false;
  found.path = it->path;
  found.loaded = true;
  found.elf = inspect_elf(it->path, ElfDepth::kHeaders);
  return true;
}

}  // namespace

std::vector<std::string> hwcaps_folders(const std::string& folder) {
  std::vector<std::string> out;
  std::error_code error;
  for (fs::directory_iterator it(folder + "/glibc-hwcaps", error), end; !error && it != end;
       it.increment(error)) {
    out.push_back(it->path().string());
  }
  std::sort(out.rbegin(), out.rend());
  return out;
}

std::vector<LoadedLibrary> loaded_libraries() {
  std::vector<LoadedLibrary> out;
  // dl_iterate_phdr holds the loader's lock, so no object is unmapped while it is read.
  dl_iterate_phdr(
      [](dl_phdr_info* object, std::size_t, void* result) {
        const std::string path = object->dlpi_name ? object->dlpi_name : "";
        if (!path.empty()) {
          static_cast<std::vector<LoadedLibrary>*>(result)->push_back(
              {path, mapped_soname(*object)});
        }
        return 0;
      },
      &out);
  return out;
}

LibraryCache parse_library_cache(std::span<const std::uint8_t> bytes) {
  const auto has_magic = [&](std::uint64_t at, std::string_view magic) {
    return at <= bytes.size() && bytes.size() - at >= magic.size() &&
           std::memcmp(bytes.data() + at, magic.data(), magic.size()) == 0;
  };
  std::uint64_t base = 0;
  if (has_magic(0, kOldMagic)) {
    std::uint32_t old_entries = 0;
    get_object(bytes, 12, old_entries);
    base = (kOldHeaderBytes + old_entries * kOldEntryBytes + 7) / 8 * 8;
  }
  LibraryCache out;
  if (!has_magic(base, kNewMagic)) return out;
  const std::span<const std::uint8_t> cache = bytes.subspan(base);
  std::uint32_t count = 0;
  get_object(cache, kNewMagic.size(), count);
  for (std::uint64_t i = 0; i < count; ++i) {
    std::uint32_t entry[3];  // flags, offset of the soname, offset of the file name
    if (!get_object(cache, kNewHeaderBytes + i * kNewEntryBytes, entry)) break;
    auto soname = c_string_at(cache, entry[1]);
    auto file = c_string_at(cache, entry[2]);
    if (soname && file && !file->empty()) out.emplace(std::move(*soname), std::move(*file));
  }
  return out;
}

SearchRules SearchRules::of_process() {
  SearchRules rules;
  rules.library_path = split_folders(starting_library_path(), ":;");
  const char* now = std::getenv("LD_LIBRARY_PATH");
  rules.late_library_path = split_folders(now ? now : "", ":;");
  std::erase_if(rules.late_library_path, [&](const std::string& folder) {
    return std::count(rules.library_path.begin(), rules.library_path.end(), folder) > 0;
  });
  const std::string program = "/proc/self/exe";
  std::error_code error;
  const std::string program_path = fs::read_symlink(program, error).string();
  // The inspector reports a program as unusable, but still reads its RPATH.
  const ElfInfo elf = inspect_elf(program, ElfDepth::kHeaders);
  if (elf.runpath.empty()) {
    for (const std::string& folder : elf.rpath) {
      rules.program_rpath.push_back(expand_tokens(folder, program_path));
    }
  }
  rules.cache = parse_library_cache(ByteSource("/etc/ld.so.cache").read_some(0, kMaxCacheBytes));
  const std::string arch = multiarch();
  rules.default_folders = {"/lib/" + arch, "/usr/lib/" + arch, "/lib64", "/usr/lib64",
                           "/lib",         "/usr/lib"};
  rules.loaded = loaded_libraries();
  return rules;
}

std::string expand_tokens(std::string_view entry, const std::string& library_path) {
  const auto read_variable = [&](std::string_view name) -> std::string {
    if (name == "ORIGIN") return absolute_folder(library_path);
    if (name == "LIB") return "lib/" + multiarch();
    const auto* platform = reinterpret_cast<const char*>(getauxval(AT_PLATFORM));
    return platform ? platform : "";
  };
  std::string out;
  while (!entry.empty()) {
    if (entry[0] == '$') {
      bool expanded = false;
      for (const std::string_view name : {"ORIGIN", "LIB", "PLATFORM"}) {
        const std::string braced = "${" + std::string(name) + "}";
        const std::string plain = "$" + std::string(name);
        const bool in_braces = entry.starts_with(braced);
        if (!in_braces && !entry.starts_with(plain)) continue;
        out += read_variable(name);
        entry.remove_prefix(in_braces ? braced.size() : plain.size());
        expanded = true;
        break;
      }
      if (expanded) continue;
    }
    out += entry[0];
    entry.remove_prefix(1);
  }
  return out;
}

FoundLibrary find_library(const std::string& name, std::span<const Requester> chain,
                          const SearchRules& rules) {
  FoundLibrary found;
  const std::string owner = chain.empty() ? std::string() : chain.front().path;
  const std::string expanded = owner.empty() ? name : expand_tokens(name, owner);
  if (find_loaded(expanded, rules, found)) return found;
  if (expanded.find('/') != expanded.npos) {
    try_file(expanded, found);
    return found;
  }
  const bool has_runpath = !chain.empty() && !chain.front().runpath.empty();
  if (!has_runpath) {
    for (const Requester& r : chain) {
      // The loader ignores the RPATH of an object that has a RUNPATH.
      if (r.runpath.empty() && try_folders(r.rpath, r.path, name, found)) return found;
    }
    if (try_folders(rules.program_rpath, {}, name, found)) return found;
  }
  if (try_folders(rules.library_path, {}, name, found)) return found;
  if (has_runpath && try_folders(chain.front().runpath, owner, name, found)) return found;
  const auto [first, last] = rules.cache.equal_range(name);
  for (auto it = first; it != last; ++it) {
    if (try_file(it->second, found)) return found;
  }
  try_folders(rules.default_folders, {}, name, found);
  return found;
}

}  // namespace te_fl::plugins
