#include "plugins/preflight.hpp"

#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>

#include "plugins/nearest.hpp"
#include "plugins/soname_hints.hpp"

namespace te_fl::plugins {
namespace {

constexpr std::size_t kMaxClosure = 1024;
constexpr std::size_t kMaxDemangledInput = 2048;
constexpr std::size_t kMaxSymbolsPerVersion = 3;

std::string demangle(const std::string& name) {
  if (!name.starts_with("_Z") || name.size() > kMaxDemangledInput) return {};
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(
      abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status), &std::free);
  return status == 0 && text ? std::string(text.get()) : std::string();
}

// Orders "GLIBC_2.9" before "GLIBC_2.36": compares runs of digits as numbers.
bool version_less(std::string_view a, std::string_view b) {
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  while (!a.empty() && !b.empty()) {
    if (digit(a[0]) && digit(b[0])) {
      const auto take = [&](std::string_view& s) {
        std::size_t n = 0;
        while (n < s.size() && digit(s[n])) ++n;
        std::string_view number = s.substr(0, n);
        s.remove_prefix(n);
        while (number.size() > 1 && number[0] == '0') number.remove_prefix(1);
        return number;
      };
      const std::string_view x = take(a);
      const std::string_view y = take(b);
      if (x != y) return x.size() != y.size() ? x.size() < y.size() : x < y;
    } else if (a[0] != b[0]) {
      return a[0] < b[0];
    } else {
      a.remove_prefix(1);
      b.remove_prefix(1);
    }
  }
  return a.size() < b.size();
}

// The highest version that the library defines in the family of `wanted` ("GLIBC_").
std::string highest_present(const ElfInfo& library, std::string_view wanted) {
  const std::string_view family = wanted.substr(0, wanted.find_last_of('_') + 1);
  std::string best;
  for (const std::string& v : library.version_definitions) {
    const bool number =
        v.size() > family.size() && v[family.size()] >= '0' && v[family.size()] <= '9';
    if (v.starts_with(family) && number && (best.empty() || version_less(best, v))) best = v;
  }
  return best;
}

// True if a mangled name belongs to namespace std, or is a guard or a local of such a name.
bool in_namespace_std(std::string_view name) {
  if (!name.starts_with("_Z")) return false;
  name.remove_prefix(2);
  if (name.starts_with("GV")) name.remove_prefix(2);
  while (!name.empty() && (name[0] == 'Z' || name[0] == 'N' || name[0] == 'K'))
    name.remove_prefix(1);
  return name.starts_with("St");
}

// One library of the dependency closure. The plugin is the first.
struct Node {
  std::string name;  // as requested
  std::string path;
  bool loaded = false;
  std::size_t parent = 0;  // index of the first library that needs it; 0 for the plugin
  ElfInfo elf;             // with symbols only if `full`
  bool full = false;
};

class Preflight {
 public:
  Preflight(const SearchRules& rules, std::span<const LibraryPackage> packages,
            PreflightReport& report)
      : rules_(rules), packages_(packages), report_(report) {}

  void run() {
    report_.elf = inspect_elf(report_.path);
    if (!report_.elf.sound()) return;
    check_entry();
    note_warnings();
    nodes_.push_back({report_.path, report_.path, false, 0, report_.elf, true});
    for (std::size_t i = 0; i < nodes_.size(); ++i) visit(i);
    for (std::size_t i = 1; i < nodes_.size(); ++i) {
      report_.libraries.push_back({nodes_[i].name, nodes_[i].path, nodes_[i].loaded});
    }
    if (!report_.missing_libraries.empty()) report_.symbols_checked = false;
    for (std::size_t i = 0; i < nodes_.size(); ++i) check_versions(i);
    check_symbols();
  }

 private:
  void check_entry() {
    const ElfInfo& elf = report_.elf;
    if (elf.no_dlopen) {
      report_.problems.push_back(
          "it forbids being opened (linked with -z nodlopen); link it again");
    }
    if (report_.required_symbol.empty() || elf.exports(report_.required_symbol)) return;
    report_.lacks_required_symbol = true;
    std::vector<std::string_view> names;
    for (const ElfSymbol& s : elf.defined) {
      // The most common cause is a missing extern "C": the mangled name then contains the plain
      // one.
      const bool mangled =
          s.name.starts_with("_Z") && s.name.find(report_.required_symbol) != std::string::npos;
      if (mangled) {
        report_.similar_symbol = s.name;
        return;
      }
      if (names.size() < 4096) names.push_back(s.name);
    }
    report_.similar_symbol = nearest_name(report_.required_symbol, names);
  }

  void note_warnings() {
    const ElfInfo& elf = report_.elf;
    auto& out = report_.warnings;
    out = elf.warnings;
    if (elf.executable_stack) {
      out.push_back(
          "it requests an executable stack, which glibc 2.41 and later refuse; add a "
          ".note.GNU-stack section to its assembler files or link with -z noexecstack");
    }
    if (elf.writable_executable) out.push_back("it has a segment both writable and executable");
    if (elf.text_relocations) out.push_back("it has text relocations; compile it with -fPIC");
    if (elf.static_tls) {
      out.push_back(
          "it uses static thread-local storage, of which a process can run out; compile "
          "it without -ftls-model=initial-exec");
    }
    // Unique symbols of the standard library are the same in every plugin, so they are harmless.
    std::vector<std::string> unique = elf.unique;
    std::erase_if(unique, in_namespace_std);
    if (!unique.empty()) {
      const std::string readable = demangle(unique.front());
      out.push_back("it exports " + std::to_string(unique.size()) +
                    " unique symbols (first: " + (readable.empty() ? unique.front() : readable) +
                    "), which all libraries of the process share in spite of RTLD_LOCAL; build "
                    "with -fvisibility=hidden and an export list, or -fno-gnu-unique");
    }
  }

  std::vector<Requester> requester_chain(std::size_t index) const {
    std::vector<Requester> chain;
    while (true) {
      const Node& n = nodes_[index];
      chain.push_back({n.path, n.elf.rpath, n.elf.runpath});
      if (n.parent == index) return chain;
      index = n.parent;
    }
  }

  std::string chain_text(const std::string& name, std::size_t parent) const {
    std::string out = name;
    for (std::size_t i = parent;; i = nodes_[i].parent) {
      const std::string& path = nodes_[i].path;
      out += ", needed by " + path.substr(path.find_last_of('/') + 1);
      if (nodes_[i].parent == i) return out;
    }
  }

  void visit(std::size_t index) {
    const std::vector<std::string> needed = nodes_[index].elf.needed;
    for (const std::string& name : needed) {
      if (const auto known = missing_.find(name); known != missing_.end()) {
        auto& users = report_.missing_libraries[known->second].needed_by;
        if (users.back() != nodes_[index].path) users.push_back(nodes_[index].path);
        continue;
      }
      if (in_closure(name) || nodes_.size() >= kMaxClosure) continue;
      FoundLibrary found = find_library(name, requester_chain(index), rules_);
      if (!found.path.empty()) {
        nodes_.push_back({name, found.path, found.loaded, index, std::move(found.elf), false});
        continue;
      }
      missing_[name] = report_.missing_libraries.size();
      report_.missing_libraries.push_back(
          {name, {nodes_[index].path}, chain_text(name, index), found.rejected, hint_for(name)});
    }
  }

  std::string hint_for(const std::string& name) const {
    for (const std::string& folder : rules_.late_library_path) {
      if (!inspect_elf(folder + "/" + name, ElfDepth::kHeaders).sound()) continue;
      return "it is in " + folder +
             ", which joined LD_LIBRARY_PATH after the program had started; the loader reads that "
             "variable only at start, so set it before";
    }
    return soname_hint(name, packages_);
  }

  bool in_closure(const std::string& name) const { return node_named(name) != nullptr; }

  const Node* node_named(const std::string& name) const {
    const auto it = std::find_if(nodes_.begin(), nodes_.end(), [&](const Node& n) {
      return n.name == name || n.elf.soname == name;
    });
    return it == nodes_.end() ? nullptr : &*it;
  }

  void check_versions(std::size_t index) {
    const Node& user = nodes_[index];
    if (user.loaded) return;
    // A copy, since reading a node's symbols replaces its ElfInfo.
    const std::vector<ElfVersionNeed> needs = user.elf.version_needs;
    for (const ElfVersionNeed& need : needs) {
      const Node* library = node_named(need.file);
      if (need.weak || library == nullptr || !library->elf.sound()) continue;
      const auto& defined = library->elf.version_definitions;
      // The loader accepts a library without any version definitions, with a warning.
      if (defined.empty() || std::count(defined.begin(), defined.end(), need.version)) continue;
      if (!missing_version_names_.insert({need.file, need.version, user.path}).second) continue;
      MissingVersion missing{need.file,
                             library->path,
                             need.version,
                             highest_present(library->elf, need.version),
                             user.path,
                             {},
                             version_hint(need.version, need.file)};
      missing.symbols = symbols_of_version(index, need);
      report_.missing_versions.push_back(std::move(missing));
    }
  }

  std::vector<std::string> symbols_of_version(std::size_t index, const ElfVersionNeed& need) {
    std::vector<std::string> out;
    for (const ElfSymbol& s : symbols(index).undefined) {
      if (s.version != need.version || s.version_file != need.file) continue;
      if (out.size() == kMaxSymbolsPerVersion) break;
      const std::string readable = demangle(s.name);
      out.push_back(readable.empty() ? s.name : readable);
    }
    return out;
  }

  // The node's symbols, which are read on first use.
  const ElfInfo& symbols(std::size_t index) {
    Node& n = nodes_[index];
    if (!n.full) {
      n.full = true;
      n.elf = inspect_elf(n.path);
      // A mapped library without a file (deleted, or the vdso) may define any symbol.
      if (!n.elf.sound()) {
        report_.symbols_checked = false;
        if (!n.loaded) report_.problems.push_back(n.path + " " + n.elf.problem);
      }
    }
    return n.elf;
  }

  bool in_global_scope(const ElfSymbol& s) const {
    if (!rules_.use_global_scope) return false;
    return s.version.empty() ? dlsym(RTLD_DEFAULT, s.name.c_str()) != nullptr
                             : dlvsym(RTLD_DEFAULT, s.name.c_str(), s.version.c_str()) != nullptr;
  }

  bool in_closure_scope(const ElfSymbol& s) {
    // The library that the version names is tried first, since that usually avoids reading the
    // others.
    for (std::size_t i = 0; i < nodes_.size() && !s.version_file.empty(); ++i) {
      const bool named = nodes_[i].name == s.version_file || nodes_[i].elf.soname == s.version_file;
      if (named && symbols(i).provides(s.name, s.version)) return true;
    }
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (symbols(i).provides(s.name, s.version)) return true;
    }
    return false;
  }

  void check_symbols() {
    std::set<std::string> seen;
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (nodes_[i].loaded) continue;
      const std::vector<ElfSymbol> undefined = symbols(i).undefined;
      for (const ElfSymbol& s : undefined) {
        const bool reported =
            missing_version_names_.count({s.version_file, s.version, nodes_[i].path}) > 0;
        // Symbols that a missing library should define are not reported again.
        const bool of_missing = missing_.count(s.version_file) > 0;
        if (s.weak || reported || of_missing || in_global_scope(s) || in_closure_scope(s)) continue;
        if (!seen.insert(s.name + '@' + s.version).second) continue;
        ++report_.missing_symbol_count;
        if (report_.missing_symbols.size() < PreflightReport::kMaxSymbolsNamed) {
          report_.missing_symbols.push_back({s.name, demangle(s.name), s.version, nodes_[i].path});
        }
      }
    }
    dlerror();  // clears the errors of the failed look-ups above
    if (report_.symbols_checked) return;
    report_.missing_symbols.clear();
    report_.missing_symbol_count = 0;
  }

  struct VersionKey {
    std::string file, version, user;
    auto operator<=>(const VersionKey&) const = default;
  };

  const SearchRules& rules_;
  const std::span<const LibraryPackage> packages_;
  PreflightReport& report_;
  std::vector<Node> nodes_;
  std::map<std::string, std::size_t> missing_;
  std::set<VersionKey> missing_version_names_;
};

}  // namespace

PreflightReport preflight(const std::string& path, const std::string& required_symbol) {
  return preflight(path, required_symbol, SearchRules::of_process());
}

PreflightReport preflight(const std::string& path, const std::string& required_symbol,
                          const SearchRules& rules, std::span<const LibraryPackage> packages) {
  PreflightReport report;
  report.path = path;
  report.required_symbol = required_symbol;
  Preflight(rules, packages, report).run();
  return report;
}

}  // namespace te_fl::plugins
