// Names the package that has a missing library.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace te_fl::plugins {

struct LibraryPackage {
  std::string soname;  // exact, or a stem that ends in ".so" and covers every version
  std::string apt;     // Debian/Ubuntu package, or empty
  std::string note;    // where that package comes from, or another installer; may be empty
  std::string pypi;    // PyPI package, or empty
};

// One sentence that says how to install the library with this soname: the Debian/Ubuntu package,
// the PyPI package where there is one, or the vendor's installer. `packages`, of the manifest of
// the plugin that needs the library, come before those that te-fl knows itself. A soname that
// neither has gets the apt-file command that finds it. Never empty. Thread-safe.
std::string soname_hint(std::string_view soname, std::span<const LibraryPackage> packages = {});

// A way out where `library` lacks a version such as "GLIBC_2.99" or "CXXABI_1.3.15".
std::string version_hint(std::string_view version, std::string_view library);

// The hint that lies in an undefined symbol's name ("__asan_" means built with AddressSanitizer);
// empty if there is none.
std::string symbol_hint(std::string_view symbol);

}  // namespace te_fl::plugins
