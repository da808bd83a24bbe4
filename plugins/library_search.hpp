// Finds a needed library in the way of the dynamic loader (glibc's ld.so), without loading it.
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

// The libraries that are mapped now, without the program itself. Thread-safe.
std::vector<LoadedLibrary> loaded_libraries();

// The contents of ld.so.cache: soname -> files, in the order of the cache.
using LibraryCache = std::multimap<std::string, std::string, std::less<>>;

// Parses the bytes of an ld.so.cache in the "glibc-ld.so.cache1.1" format, alone or after a table
// of the older "ld.so-1.7.0" format. Skips damaged entries. Other formats yield an empty cache.
LibraryCache parse_library_cache(std::span<const std::uint8_t> bytes);

// The places to search for libraries. of_process() gives those of this process; tests use their
// own.
struct SearchRules {
  std::vector<std::string> library_path;  // LD_LIBRARY_PATH, as the loader read it at start
  // Folders that were added to LD_LIBRARY_PATH after the start. The loader does not search them; a
  // library found only there is missing, and the report says so.
  std::vector<std::string> late_library_path;
  std::vector<std::string> program_rpath;    // DT_RPATH of the program, expanded
  LibraryCache cache;                        // contents of ld.so.cache
  std::vector<std::string> default_folders;  // for example /lib/x86_64-linux-gnu
  std::vector<LoadedLibrary> loaded;
  bool use_global_scope = true;  // symbols of the global scope count as provided

  // Reads the rules of this process: its starting environment (later changes of LD_LIBRARY_PATH do
  // not reach the loader), /etc/ld.so.cache, its mapped libraries.
  static SearchRules of_process();
};

// Expands $ORIGIN, $LIB and $PLATFORM (also in braces) in an RPATH, RUNPATH or DT_NEEDED entry.
std::string expand_tokens(std::string_view entry, const std::string& library_path);

// The folders below a folder's glibc-hwcaps, those with the highest requirements first.
std::vector<std::string> hwcaps_folders(const std::string& folder);

// An object whose RPATH or RUNPATH is used in a search.
struct Requester {
  std::string path;
  std::vector<std::string> rpath;
  std::vector<std::string> runpath;
};

struct FoundLibrary {
  std::string path;      // empty when it was not found
  bool loaded = false;   // already mapped in the process
  ElfInfo elf;           // headers only; empty for a loaded library without a file
  std::string rejected;  // unsuitable files of that name, with reasons
  // Both lists are for checking which users could influence the result. run_path_folders: the RPATH
  // and RUNPATH folders searched, $ORIGIN expanded, up to the folder with the file. met: every file
  // of that name found in any folder, including unsuitable files.
  std::vector<std::string> run_path_folders;
  std::vector<std::string> met;
};

// Finds the library `name` for `chain`: the object that needs it, then the object that loaded that
// one, and so on. Search order: libraries already loaded; RPATHs of the chain unless the first
// object has a RUNPATH; the program's RPATH; LD_LIBRARY_PATH; the first object's RUNPATH; the
// cache; the default folders. Skips files for another architecture, like the loader. Searches a
// folder's glibc-hwcaps before the folder itself, for all processors: the loader decides which of
// them it uses.
FoundLibrary find_library(const std::string& name, std::span<const Requester> chain,
                          const SearchRules& rules);

}  // namespace te_fl::plugins
