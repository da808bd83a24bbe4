#include <algorithm>

#include "plugins/preflight.hpp"
#include "plugins/soname_hints.hpp"

namespace te_fl::plugins {
namespace {

constexpr std::size_t kMaxCharsShown = 240;

// Sanitises a name for a message: one line and limited length, since damaged files may contain
// anything.
std::string shown(const std::string& text) {
  std::string out;
  for (const char c : text.substr(0, kMaxCharsShown)) {
    const auto byte = static_cast<unsigned char>(c);
    out += byte < 0x20 || byte == 0x7f ? '?' : c;
  }
  return text.size() > kMaxCharsShown ? out + "..." : out;
}

std::string base_name(const std::string& path) { return path.substr(path.find_last_of('/') + 1); }

std::string describe_count(std::size_t n, const std::string& singular, const std::string& plural) {
  return std::to_string(n) + " " + (n == 1 ? singular : plural);
}

std::string symbol_text(const MissingSymbol& s) {
  std::string out = shown(s.demangled.empty() ? s.name : s.demangled);
  if (!s.demangled.empty()) out += " [" + shown(s.name) + "]";
  if (!s.version.empty()) out += ", version " + shown(s.version);
  return out;
}

std::string version_text(const MissingVersion& v) {
  std::string out = shown(v.version) + " of " + shown(v.soname) + " is needed by " +
                    shown(base_name(v.needed_by)) + ", and " + shown(v.library_path) + " has ";
  return out + (v.present.empty() ? "none of that family" : "only up to " + shown(v.present));
}

// One line per problem, the most serious first.
std::vector<std::string> problem_lines(const PreflightReport& r) {
  std::vector<std::string> out;
  if (!r.elf.sound()) out.push_back(shown(r.path) + " " + shown(r.elf.problem));
  for (const std::string& p : r.problems) out.push_back(shown(p));
  for (const MissingLibrary& m : r.missing_libraries) {
    out.push_back("library " + shown(m.chain) + ", was not found");
  }
  for (const MissingVersion& v : r.missing_versions) out.push_back(version_text(v));
  if (r.lacks_required_symbol) {
    out.push_back("it does not export " + shown(r.required_symbol));
  }
  if (r.missing_symbol_count > 0) {
    out.push_back(
        "no library provides " + symbol_text(r.missing_symbols.front()) +
        (r.missing_symbol_count > 1
             ? " and " + describe_count(r.missing_symbol_count - 1, "other symbol", "other symbols")
             : ""));
  }
  return out;
}

void add_libraries(const PreflightReport& r, std::string& out) {
  for (const MissingLibrary& m : r.missing_libraries) {
    out += "\n  missing library " + shown(m.chain);
    for (std::size_t i = 1; i < m.needed_by.size(); ++i) {
      out += (i == 1 ? "\n    also needed by " : ", ") + shown(base_name(m.needed_by[i]));
    }
    if (!m.rejected.empty()) out += "\n    passed over: " + shown(m.rejected);
    out += "\n    way out: " + m.hint;
  }
}

void add_versions(const PreflightReport& r, std::string& out) {
  for (const MissingVersion& v : r.missing_versions) {
    out += "\n  missing version " + version_text(v);
    for (std::size_t i = 0; i < v.symbols.size(); ++i) {
      out += (i == 0 ? "\n    for " : ", ") + shown(v.symbols[i]);
    }
    out += "\n    way out: " + v.hint;
  }
}

void add_entry(const PreflightReport& r, std::string& out) {
  if (!r.lacks_required_symbol) return;
  out += "\n  missing entry symbol " + shown(r.required_symbol);
  if (r.similar_symbol.starts_with("_Z")) {
    out += "\n    it exports " + shown(r.similar_symbol) + ": declare the function extern \"C\"";
  } else if (!r.similar_symbol.empty()) {
    out += "\n    it exports " + shown(r.similar_symbol) + "; was that meant?";
  } else if (r.elf.defined.empty()) {
    out += "\n    it exports nothing at all: check its visibility flags and export list";
  } else {
    out += "\n    it exports " + describe_count(r.elf.defined.size(), "symbol", "symbols") +
           ", none of that name; is it a te-fl plugin?";
  }
}

void add_symbols(const PreflightReport& r, std::string& out) {
  for (const MissingSymbol& s : r.missing_symbols) {
    out +=
        "\n  undefined symbol " + symbol_text(s) + ", needed by " + shown(base_name(s.needed_by));
  }
  if (r.missing_symbol_count > r.missing_symbols.size()) {
    out += "\n  and " + describe_count(r.missing_symbol_count - r.missing_symbols.size(),
                                       "more undefined symbol", "more undefined symbols");
  }
  if (r.missing_symbols.empty()) return;
  const std::string hint = symbol_hint(r.missing_symbols.front().name);
  out += "\n    way out: " +
         (hint.empty() ? "link it with the library that defines them (-Wl,-z,defs finds this when "
                         "linking), or install the version it was built with"
                       : hint);
}

}  // namespace

bool PreflightReport::ok() const {
  return elf.sound() && problems.empty() && missing_libraries.empty() && missing_versions.empty() &&
         !lacks_required_symbol && missing_symbol_count == 0;
}

std::string PreflightReport::to_string() const {
  const std::vector<std::string> lines = problem_lines(*this);
  std::string out;
  if (lines.empty()) {
    const auto loaded = std::count_if(libraries.begin(), libraries.end(),
                                      [](const ClosureLibrary& l) { return l.loaded; });
    out = shown(path) + " can be loaded (" +
          describe_count(libraries.size(), "needed library", "needed libraries") + " found, " +
          std::to_string(loaded) + " of them loaded already)";
  } else if (!elf.sound()) {
    out = lines.front();
  } else {
    out = shown(path) + " cannot be loaded: " + lines.front();
    if (lines.size() > 1)
      out += " (and " + describe_count(lines.size() - 1, "more problem", "more problems") + ")";
  }
  for (std::size_t i = 1; i < problems.size(); ++i) out += "\n  " + shown(problems[i]);
  add_libraries(*this, out);
  add_versions(*this, out);
  add_entry(*this, out);
  add_symbols(*this, out);
  if (!symbols_checked && elf.sound()) {
    out += "\n  symbols were not checked, since not every needed library could be read";
  }
  for (const std::string& w : warnings) out += "\n  warning: " + shown(w);
  return out;
}

}  // namespace te_fl::plugins
