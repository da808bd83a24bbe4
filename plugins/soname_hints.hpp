// Names the package that has a missing library.
#pragma once

#include <string>
#include <string_view>

namespace te_fl::plugins {

// One sentence that says how to install the library with this soname: the Debian/Ubuntu package,
// the PyPI package where there is one, or the vendor's installer. A soname that is not in the table
// gets the apt-file command that finds it. Never empty. Thread-safe.
std::string soname_hint(std::string_view soname);

// A way out where `library` lacks a version such as "GLIBC_2.99" or "CXXABI_1.3.15".
std::string version_hint(std::string_view version, std::string_view library);

// The hint that lies in an undefined symbol's name ("__asan_" means built with AddressSanitizer);
// empty if there is none.
std::string symbol_hint(std::string_view symbol);

}  // namespace te_fl::plugins
