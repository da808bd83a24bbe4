// The result of the ELF reader (elf_inspect.hpp).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace te_fl::plugins {

enum class ElfKind {
  kSharedLibrary,  // ET_DYN that the dynamic loader would map
  kMissing,        // no such file
  kUnreadable,     // no permission, or an I/O error
  kFolder,
  kSpecial,  // device, pipe, socket
  kEmpty,
  kText,         // text, a linker script, or a Git LFS pointer; `problem` says which
  kArchive,      // a static library, or a zip archive such as a Python wheel
  kRelocatable,  // an object file (.o)
  kExecutable,   // a program, position-independent or not
  kCore,
  kForeign,  // a library of another system (PE, Mach-O)
  kUnknown,  // none of these
  kTruncated,
  kCorrupt,
};

// The amount of a library that inspect_elf() reads. kHeaders leaves `undefined`, `defined` and
// `unique` empty and is many times faster for a library with many exports.
enum class ElfDepth { kHeaders, kSymbols };

struct ElfSymbol {
  std::string name;
  std::string version;       // "GLIBC_2.34", or empty
  std::string version_file;  // undefined symbols: the soname that must define the version
  bool weak = false;
  bool function = false;
};

// One version that this file requires of a library it needs.
struct ElfVersionNeed {
  std::string file;     // soname, as in DT_NEEDED
  std::string version;  // for example "GLIBC_2.34"
  bool weak = false;    // VER_FLG_WEAK: the loader only warns when it is absent
};

struct ElfInfo {
  ElfKind kind = ElfKind::kUnknown;
  // Empty for a valid shared library for this host. Otherwise the end of a sentence that begins
  // with the path, such as "is an aarch64 library, and this host is x86_64".
  std::string problem;
  // A valid library, but for another architecture, word size or byte order.
  bool wrong_host = false;

  std::uint16_t machine = 0;  // e_machine
  int bits = 0;               // 32 or 64
  bool big_endian = false;
  std::string architecture;  // "x86_64", "aarch64", "machine 243"

  // The members below are filled only for libraries of this host's word size and byte order.
  std::string soname;
  std::vector<std::string> needed;   // DT_NEEDED in file order
  std::vector<std::string> filters;  // DT_AUXILIARY and DT_FILTER; loaded as well
  std::vector<std::string> rpath;    // DT_RPATH split at ':', $ORIGIN not expanded
  std::vector<std::string> runpath;  // DT_RUNPATH; when present the loader ignores DT_RPATH
  std::vector<ElfVersionNeed> version_needs;
  std::vector<std::string> version_definitions;  // verdef names, without the file's own name
  std::string build_id;                          // lower-case hex, empty when absent
  std::vector<ElfSymbol> undefined;
  std::vector<ElfSymbol> defined;     // visible to other libraries, sorted by name
  std::vector<std::string> unique;    // defined with STB_GNU_UNIQUE
  bool writable_executable = false;   // has a writable and executable segment
  bool text_relocations = false;      // has DT_TEXTREL
  bool executable_stack = false;      // requested, or the default and not declined
  bool static_tls = false;            // has DF_STATIC_TLS
  bool no_dlopen = false;             // has DF_1_NOOPEN
  std::vector<std::string> warnings;  // anomalies that do not prevent loading

  bool sound() const { return problem.empty(); }
  // True if a default-visible symbol of that name is defined. Needs ElfDepth::kSymbols.
  bool exports(std::string_view name) const;
  // True if a symbol is defined for an importer that needs `version` (empty: any). A definition
  // without a version satisfies every importer, as in the dynamic loader.
  bool provides(std::string_view name, std::string_view version) const;
};

}  // namespace te_fl::plugins
