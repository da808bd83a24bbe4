#include "plugins/soname_hints.hpp"

#include <algorithm>
#include <iterator>

namespace te_fl::plugins {
namespace {

// The members of LibraryPackage, as string views.
struct ShippedPackage {
  std::string_view soname, apt, note, pypi;
};

// The included file is generated from the manifests of te-fl's own plugins and from
// backends/packages.json.
constexpr ShippedPackage kShipped[] = {
#include "shipped/packages.inc"
};
static_assert(std::all_of(std::begin(kShipped), std::end(kShipped), [](const ShippedPackage& p) {
  return !p.soname.empty() && !(p.apt.empty() && p.note.empty() && p.pypi.empty());
}));

// The first package with the exact soname, otherwise the first one of its family; null if there is
// none.
template <class Package>
const Package* find_package(std::span<const Package> packages, std::string_view soname) {
  const auto find = [&](auto&& fits) {
    const auto at = std::find_if(packages.begin(), packages.end(), fits);
    return at == packages.end() ? nullptr : &*at;
  };
  const Package* exact = find([&](const Package& p) { return p.soname == soname; });
  if (exact != nullptr) return exact;
  return find([&](const Package& p) {
    const std::string_view stem = p.soname;
    return stem.ends_with(".so") && soname.starts_with(stem) && soname[stem.size()] == '.';
  });
}

template <class Package>
std::string install_text(const Package& package) {
  const std::string apt(package.apt), note(package.note), pypi(package.pypi);
  if (apt.empty() && pypi.empty()) return note;
  const std::string from = note.empty() ? "" : " (" + note + ")";
  std::string out;
  if (!apt.empty()) out = "install the apt package " + apt + from;
  if (!pypi.empty()) {
    out += (apt.empty() ? "install the PyPI package " : ", or the PyPI package ") + pypi +
           (apt.empty() ? from : "") +
           ", whose lib folder must be in LD_LIBRARY_PATH before the program starts";
  }
  return out;
}

}  // namespace

std::string soname_hint(std::string_view soname, std::span<const LibraryPackage> packages) {
  if (const LibraryPackage* own = find_package(packages, soname)) return install_text(*own);
  if (const auto* shipped = find_package(std::span<const ShippedPackage>(kShipped), soname))
    return install_text(*shipped);
  return "find its package with: apt-file search " + std::string(soname) +
         "; if it is installed in a folder of its own, add that folder to LD_LIBRARY_PATH before "
         "the program starts";
}

std::string version_hint(std::string_view version, std::string_view library) {
  if (version.starts_with("GLIBC_")) {
    return "it was built on a newer system: rebuild it on this one or an older one, or move to a "
           "system whose C library has that version";
  }
  if (version.starts_with("GLIBCXX_") || version.starts_with("CXXABI_")) {
    return "it was built with a newer compiler: update libstdc++6, rebuild it here, or link it "
           "with "
           "-static-libstdc++; a conda environment may also bring an older libstdc++ first";
  }
  return "install a newer " + std::string(library) + ", or rebuild it here";
}

std::string symbol_hint(std::string_view symbol) {
  if (symbol.starts_with("__asan_")) {
    return "it was built with AddressSanitizer: start the program with LD_PRELOAD=libasan.so.8";
  }
  if (symbol.starts_with("__tsan_")) {
    return "it was built with ThreadSanitizer: start the program with LD_PRELOAD=libtsan.so.2";
  }
  if (symbol.starts_with("__ubsan_")) {
    return "it was built with UndefinedBehaviorSanitizer: link it with -fsanitize=undefined";
  }
  if (symbol.starts_with("te_fl_")) {
    return "a plugin receives the host's functions through its tables and must not link to them";
  }
  return {};
}

}  // namespace te_fl::plugins
