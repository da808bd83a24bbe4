// Finds the package that provides a missing library.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace te_fl::plugins {

struct LibraryPackage {
  std::string soname;  // exact, or a stem that ends in ".so" and covers every version
  std::string apt;     // Debian/Ubuntu package, or empty
  std::string note;    // the package's source, or another installer; may be empty
  std::string pypi;    // PyPI package, or empty
};

// A sentence that says how to install the library: the Debian/Ubuntu package, the PyPI package if
// there is one, or the vendor's installer. `packages` come from the manifest of the plugin that
// needs the library and take precedence over te-fl's own list. For an unknown soname it contains
// the apt-file command that finds the package. Never empty. Thread-safe.
std::string soname_hint(std::string_view soname, std::span<const LibraryPackage> packages = {});

// A remedy if `library` lacks a version such as "GLIBC_2.99" or "CXXABI_1.3.15".
std::string version_hint(std::string_view version, std::string_view library);

// The cause that an undefined symbol's name suggests ("__asan_": built with AddressSanitizer);
// empty if there is none.
std::string symbol_hint(std::string_view symbol);

}  // namespace te_fl::plugins
