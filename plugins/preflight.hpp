// Says why the dynamic loader refused a library, or would refuse it. It decides nothing: what the
// loader takes is loaded.
//
// The dynamic loader stops at its first error and names only that. This walks the whole closure of
// needed libraries and reports everything at once, with who needs what and what to install.
// Nothing is loaded. Thread-safe; costs a few file reads per library, and symbol tables are read
// only of libraries that are not mapped yet and of those that must be asked for a symbol.
//
// A report is a diagnosis: absent libraries and versions always stop the loader, an undefined
// symbol does with RTLD_NOW.
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
  std::vector<std::string> needed_by;  // paths; the first is nearest to the plugin
  std::string chain;                   // "b.so, needed by a.so, needed by plugin.so"
  std::string rejected;                // files of that name that cannot serve, with reasons
  std::string hint;                    // the package to install, or another way out
};

struct MissingVersion {
  std::string soname;                // library that should define the version
  std::string library_path;          // where it was found
  std::string version;               // "GLIBC_2.99"
  std::string present;               // highest of the same family there, "GLIBC_2.36", or empty
  std::string needed_by;             // path
  std::vector<std::string> symbols;  // up to three symbols that ask for it
  std::string hint;
};

struct MissingSymbol {
  std::string name;
  std::string demangled;  // empty when the name is not mangled
  std::string version;    // empty when unversioned
  std::string needed_by;  // path
};

struct ClosureLibrary {
  std::string soname;  // the name that was asked for
  std::string path;
  bool loaded = false;  // mapped in the process before
};

struct PreflightReport {
  static constexpr std::size_t kMaxSymbolsNamed = 10;

  std::string path;
  std::string required_symbol;
  ElfInfo elf;
  bool lacks_required_symbol = false;
  std::string similar_symbol;  // an exported name that differs little, or its C++-mangled form
  std::vector<MissingLibrary> missing_libraries;
  std::vector<MissingVersion> missing_versions;
  std::vector<MissingSymbol> missing_symbols;  // the first kMaxSymbolsNamed
  std::size_t missing_symbol_count = 0;
  // False when a needed library could not be found or read, which leaves open what it provides.
  bool symbols_checked = true;
  std::vector<std::string> problems;  // anything else that stops the loader
  std::vector<std::string> warnings;  // faults that do not: executable stack, text relocations, ...
  std::vector<ClosureLibrary> libraries;

  bool ok() const;
  // Several lines for a person; the first carries the main problem, or says that all is well. No
  // line break at the end.
  std::string to_string() const;
};

// Checks the library at `path`. `required_symbol` is the entry point that it must export; empty
// asks for none.
PreflightReport preflight(const std::string& path, const std::string& required_symbol);
// Same with other search rules, for tests and for examining a prefix that is not installed yet.
// `packages`, of the plugin's manifest, say what installs a library that is missing.
PreflightReport preflight(const std::string& path, const std::string& required_symbol,
                          const SearchRules& rules, std::span<const LibraryPackage> packages = {});

}  // namespace te_fl::plugins
