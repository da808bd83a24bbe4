// te-fl check: the checks that inspect the plugin's file without loading it.
#include <algorithm>
#include <cstdlib>

#include "check_parent.hpp"
#include "plugins/preflight.hpp"
#include "te_fl/plugin.h"

namespace te_fl_tool::check {
namespace {

using te_fl::plugins::ElfInfo;
using te_fl::plugins::PreflightReport;

class Lint {
 public:
  void rule(const char* name, const std::string& wrong, const std::string& right) {
    Finding f;
    f.check = "binary", f.name = name;
    f.outcome = wrong.empty() ? Outcome::kPass : Outcome::kFail;
    f.message = wrong.empty() ? right : wrong;
    findings.push_back(std::move(f));
  }
  std::vector<Finding> findings;
};

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size() && i < 5; ++i) text += (i == 0 ? "" : ", ") + names[i];
  if (names.size() > 5) text += " and " + std::to_string(names.size() - 5) + " more";
  return text;
}

// Returns the newest required version of each family of symbol versions: "GLIBC_2.34,
// GLIBCXX_3.4.30".
std::string required_versions(const ElfInfo& elf) {
  const auto number = [](const std::string& version) {
    std::vector<int> parts;
    for (size_t at = version.find('_'); at != std::string::npos; at = version.find('.', at + 1))
      parts.push_back(std::atoi(version.c_str() + at + 1));
    return parts;
  };
  std::vector<std::string> newest;
  for (const auto& need : elf.version_needs) {
    const std::string family = need.version.substr(0, need.version.find('_') + 1);
    bool known = false;
    for (std::string& have : newest) {
      if (have.compare(0, family.size(), family) != 0) continue;
      known = true;
      if (number(have) < number(need.version)) have = need.version;
    }
    if (!known) newest.push_back(need.version);
  }
  return newest.empty() ? "no versioned symbols" : "requires " + listed(newest);
}

std::string wrong_exports(const ElfInfo& elf) {
  std::vector<std::string> others;
  for (const auto& symbol : elf.defined)
    if (symbol.name != TE_FL_PLUGIN_QUERY_SYMBOL) others.push_back(symbol.name);
  if (others.empty()) return {};
  // Lists unmangled names, which the author chose, before mangled ones, which often come from
  // templates of libraries.
  std::stable_partition(others.begin(), others.end(),
                        [](const std::string& name) { return name.rfind("_Z", 0) != 0; });
  return "rule R1: exports " + listed(others) +
         " besides te_fl_plugin_query; link with te-fl's plugin.map (te_fl_add_plugin does)";
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const auto& line : lines) text += (text.empty() ? "" : "; ") + line;
  return text;
}

}  // namespace

std::string why_unreadable(const std::string& path) {
  using te_fl::plugins::ElfKind;
  const ElfInfo elf = te_fl::plugins::inspect_elf(path, te_fl::plugins::ElfDepth::kHeaders);
  for (const ElfKind kind :
       {ElfKind::kMissing, ElfKind::kUnreadable, ElfKind::kFolder, ElfKind::kSpecial})
    if (elf.kind == kind) return path + " " + elf.problem;
  return {};
}

std::vector<Finding> lint(const std::string& path, bool& stop) {
  const PreflightReport report =
      te_fl::plugins::preflight(path, std::string(TE_FL_PLUGIN_QUERY_SYMBOL));
  const ElfInfo& elf = report.elf;
  Lint lint;
  stop = !elf.sound();
  lint.rule("library", elf.sound() ? "" : path + " " + elf.problem,
            "a sound library for " + elf.architecture);
  if (stop) return lint.findings;
  lint.rule("opens", report.ok() ? "" : report.to_string(), required_versions(elf));
  lint.rule("exports", wrong_exports(elf), "te_fl_plugin_query and nothing else");
  lint.rule("unique symbols",
            elf.unique.empty() ? ""
                               : "STB_GNU_UNIQUE: " + listed(elf.unique) +
                                     "; two libraries would share them, and neither could be "
                                     "unmapped: compile with -fno-gnu-unique",
            "none");
  lint.rule("writable code",
            elf.writable_executable ? "a segment is writable and executable; link without -z "
                                      "execstack, -N and text relocations"
                                    : "",
            "none");
  lint.rule("executable stack",
            elf.executable_stack ? "requests an executable stack; assembler files need a "
                                   ".note.GNU-stack section"
                                 : "",
            "not requested");
  lint.rule("text relocations",
            elf.text_relocations ? "has text relocations; compile with -fPIC" : "", "none");
  lint.rule("build id",
            elf.build_id.empty() ? "no build id, by which results and quarantines name the build; "
                                   "link with -Wl,--build-id"
                                 : "",
            elf.build_id);
  if (!report.warnings.empty()) lint.rule("remarks", "", joined(report.warnings));
  return lint.findings;
}

}  // namespace te_fl_tool::check
