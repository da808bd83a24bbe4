// Which package has a library that is missing.
#pragma once

#include <string>
#include <string_view>

namespace te_fl::plugins {

// One sentence that says how to install the library with this soname: the Debian/Ubuntu package,
// the PyPI package where there is one, or the vendor's installer. A soname that is not in the table
// gets the apt-file command that finds it. Never empty. Thread-safe.
std::string soname_hint(std::string_view soname);

// What to do about a version such as "GLIBC_2.99" or "CXXABI_1.3.15" that `library` lacks.
std::string version_hint(std::string_view version, std::string_view library);

// What an undefined symbol's name gives away ("__asan_" means built with AddressSanitizer); empty
// when nothing.
std::string symbol_hint(std::string_view symbol);

}  // namespace te_fl::plugins
