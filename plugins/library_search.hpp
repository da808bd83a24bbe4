// Finds a needed library the way the dynamic loader (glibc's ld.so) does, without loading it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plugins/elf_inspect.hpp"

namespace te_fl::plugins {

// A library that is mapped in this process.
struct LoadedLibrary {
  std::string path;
  std::string soname;  // may be empty
};

// The libraries mapped now, the program itself left out. Thread-safe.
std::vector<LoadedLibrary> loaded_libraries();

// ld.so.cache: soname -> files, in the cache's own order.
using LibraryCache = std::multimap<std::string, std::string, std::less<>>;

// Parses the bytes of an ld.so.cache: the "glibc-ld.so.cache1.1" format, alone or behind the older
// "ld.so-1.7.0" one. Damaged entries are left out; bytes of another format give an empty cache.
LibraryCache parse_library_cache(std::span<const std::uint8_t> bytes);

// The places in which libraries are looked for. The defaults are this process'; tests put in their
// own.
struct SearchRules {
  std::vector<std::string> library_path;  // LD_LIBRARY_PATH, as the loader read it at start
  // Folders that LD_LIBRARY_PATH holds now and did not at start. The loader does not see them; a
  // library that is only there is missing, and the report says why.
  std::vector<std::string> late_library_path;
  std::vector<std::string> program_rpath;    // DT_RPATH of the program, expanded
  LibraryCache cache;                        // ld.so.cache
  std::vector<std::string> default_folders;  // /lib/x86_64-linux-gnu, ...
  std::vector<LoadedLibrary> loaded;
  bool use_global_scope = true;  // symbols of the process' global scope count as provided

  // Reads the rules of this process: its starting environment (later changes of LD_LIBRARY_PATH do
  // not reach the loader), /etc/ld.so.cache, its mapped libraries.
  static SearchRules of_process();
};

// Expands $ORIGIN, $LIB and $PLATFORM (also in braces) in an RPATH, RUNPATH or DT_NEEDED entry.
std::string expand_tokens(std::string_view entry, const std::string& library_path);

// The sub-folders of a folder's glibc-hwcaps, the most demanding first.
std::vector<std::string> hwcaps_folders(const std::string& folder);

// An object whose RPATH or RUNPATH takes part in a search.
struct Requester {
  std::string path;
  std::vector<std::string> rpath;
  std::vector<std::string> runpath;
};

struct FoundLibrary {
  std::string path;      // empty when it was not found
  bool loaded = false;   // mapped in the process already
  ElfInfo elf;           // headers only; empty for a loaded library without a file
  std::string rejected;  // files that had the name but cannot serve, each with the reason
  // For judging who could decide what is found. Run path folders that were searched, $ORIGIN
  // expanded, down to the one with the file; and every file of the name that was met there or
  // elsewhere, those that cannot serve included.
  std::vector<std::string> run_path_folders;
  std::vector<std::string> met;
};

// Looks `name` up for `chain`: the object that needs it first, then who loaded that object, and so
// on. Order: already loaded; RPATHs of the chain unless the first has a RUNPATH; the program's
// RPATH; LD_LIBRARY_PATH; the first one's RUNPATH; the cache; the default folders. A file for
// another architecture is passed over, as the loader does. A folder's sub-folders of glibc-hwcaps
// come before the folder itself, whatever this processor can do: which of them the loader takes is
// for it to decide.
FoundLibrary find_library(const std::string& name, std::span<const Requester> chain,
                          const SearchRules& rules);

}  // namespace te_fl::plugins
