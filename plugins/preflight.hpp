// Explains why the dynamic loader refused a library or would refuse it. The report does not affect
// loading: a library that the loader accepts is loaded.
//
// The dynamic loader reports only its first error. This code examines all needed libraries
// recursively and reports all errors, with the objects that need each library and the package to
// install. It loads nothing. Thread-safe. It costs a few file reads per library. It reads symbol
// tables only of libraries that are not mapped yet and of those that may define a missing symbol.
//
// The report is a diagnosis: missing libraries and versions always stop the loader, an undefined
// symbol does so with RTLD_NOW.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "plugins/elf_inspect.hpp"
#include "plugins/library_search.hpp"
#include "plugins/soname_hints.hpp"

namespace te_fl::plugins {

struct MissingLibrary {
  std::string soname;
  std::vector<std::string> needed_by;  // paths, the one nearest to the plugin first
  std::string chain;                   // "b.so, needed by a.so, needed by plugin.so"
  std::string rejected;                // unsuitable files of that name, with reasons
  std::string hint;                    // the package to install, or another remedy
};

struct MissingVersion {
  std::string soname;                // library that should define the version
  std::string library_path;          // where the library was found
  std::string version;               // for example "GLIBC_2.99"
  std::string present;               // its highest version of that family, "GLIBC_2.36", or empty
  std::string needed_by;             // path of the library that needs it
  std::vector<std::string> symbols;  // up to three symbols that need it
  std::string hint;
};

struct MissingSymbol {
  std::string name;
  std::string demangled;  // empty when the name is not mangled
  std::string version;    // empty when unversioned
  std::string needed_by;  // path of the library that needs it
};

struct ClosureLibrary {
  std::string soname;  // the requested name
  std::string path;
  bool loaded = false;  // was already mapped in the process
};

struct PreflightReport {
  static constexpr std::size_t kMaxSymbolsNamed = 10;

  std::string path;
  std::string required_symbol;
  ElfInfo elf;
  bool lacks_required_symbol = false;
  std::string similar_symbol;  // an exported name that is similar, or its C++-mangled form
  std::vector<MissingLibrary> missing_libraries;
  std::vector<MissingVersion> missing_versions;
  std::vector<MissingSymbol> missing_symbols;  // at most kMaxSymbolsNamed of them
  std::size_t missing_symbol_count = 0;
  // False if a needed library was not found or not readable, so that its symbols are unknown.
  bool symbols_checked = true;
  std::vector<std::string> problems;  // other errors that stop the loader
  std::vector<std::string> warnings;  // non-fatal faults: executable stack, text relocations, ...
  std::vector<ClosureLibrary> libraries;

  bool ok() const;
  // Formats the report as several lines. The first line has the main problem, or says that there is
  // none. No line break at the end.
  std::string to_string() const;
};

// Checks the library at `path`. `required_symbol` is the entry point that it must export; empty:
// none.
PreflightReport preflight(const std::string& path, const std::string& required_symbol);
// As above with explicit search rules, for tests and for an installation prefix that is not in use
// yet. `packages` from the plugin's manifest name the packages of missing libraries.
PreflightReport preflight(const std::string& path, const std::string& required_symbol,
                          const SearchRules& rules, std::span<const LibraryPackage> packages = {});

}  // namespace te_fl::plugins
