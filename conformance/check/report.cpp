// te-fl check: the report as text, as JSON and as JUnit XML.
#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <set>

#include "conformance/check/check.hpp"
#include "conformance/check/output.hpp"

namespace te_fl_tool::check {
namespace {

using nlohmann::json;

struct Tally {
  int passed = 0, failed = 0, unsupported = 0;
  void count(const Finding& f) {
    (f.outcome == Outcome::kPass   ? passed
     : f.outcome == Outcome::kFail ? failed
                                   : unsupported) += f.cases;
  }
};

// Counts of findings by (op, implementation) and dtype. Findings without a dtype count only in the
// totals.
struct Matrix {
  std::set<std::string> dtypes;
  std::map<std::pair<std::string, std::string>, std::map<std::string, Tally>> rows;
  std::map<std::pair<std::string, std::string>, Tally> totals;

  explicit Matrix(const Report& report) {
    for (const Finding& f : report.findings) {
      if (f.op.empty()) continue;
      const std::pair key{f.op, f.impl};
      totals[key].count(f);
      if (f.dtype.empty() || f.dtype == "-") continue;
      dtypes.insert(f.dtype);
      rows[key][f.dtype].count(f);
    }
  }
};

std::string describe_tally(const Tally& t) {
  if (t.failed > 0) return std::to_string(t.failed) + " failed";
  if (t.passed == 0) return t.unsupported > 0 ? "not supported" : "-";
  return std::to_string(t.passed) +
         (t.unsupported > 0 ? ", " + std::to_string(t.unsupported) + " not supported" : "");
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else if (c == '\n' || static_cast<unsigned char>(c) >= 0x20)
      out += c;
    else
      out += '?';  // XML does not allow this character
  }
  return out;
}

std::string fixed(double value, int digits) {
  char text[40];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

std::string title_of(const Report& r) {
  std::string text = r.name.empty() ? r.plugin : r.name;
  if (!r.version.empty()) text += " " + r.version;
  if (!r.vendor.empty()) text += " (" + r.vendor + ")";
  return text;
}

const char* verdict_of(const Report& r) {
  if (r.count(Outcome::kFail) > 0) return "not certified";
  return r.left_out.empty() ? "certified" : "no certificate";
}

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text;
}

// The reason for which there is no certificate although nothing failed; otherwise empty.
std::string describe_shortfall(const Report& r) {
  if (r.count(Outcome::kFail) > 0 || r.left_out.empty()) return {};
  return "nothing failed, but not everything was checked: " + joined(r.left_out);
}

// A reason for refusals of an implementation, with the number of cases.
struct Refusal {
  std::string op, impl, reason, example;
  int cases = 0;
};

// Refusals, the most frequent first.
std::vector<Refusal> refusals_of(const Report& r) {
  std::map<std::array<std::string, 3>, Refusal> all;
  for (const Finding& f : r.findings) {
    if (f.outcome != Outcome::kUnsupported) continue;
    const std::string& what = f.op.empty() ? f.check : f.op;
    Refusal& refusal = all[{what, f.impl, f.message}];
    refusal.op = what, refusal.impl = f.impl, refusal.reason = f.message;
    if (refusal.example.empty()) refusal.example = f.name;
    refusal.cases += f.cases;
  }
  std::vector<Refusal> sorted;
  for (auto& [key, refusal] : all) sorted.push_back(std::move(refusal));
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const Refusal& a, const Refusal& b) { return a.cases > b.cases; });
  return sorted;
}

std::string describe_counts(const Report& r) {
  return std::to_string(r.count(Outcome::kPass)) + " passed, " +
         std::to_string(r.count(Outcome::kFail)) + " failed, " +
         std::to_string(r.count(Outcome::kUnsupported)) + " not supported";
}

std::string finding_label(const Finding& f) {
  std::string text = f.check;
  if (!f.impl.empty()) text += "  " + f.impl;
  const std::string what = !f.name.empty() ? f.name : f.op;
  if (!what.empty()) text += "  " + what;
  return text;
}

}  // namespace

const char* to_string(Outcome outcome) {
  return outcome == Outcome::kPass ? "pass" : outcome == Outcome::kFail ? "fail" : "not supported";
}

void to_json(json& out, const Finding& f) {
  out = {{"check", f.check},     {"op", f.op},
         {"impl", f.impl},       {"device", f.device},
         {"dtype", f.dtype},     {"case", f.name},
         {"message", f.message}, {"result", to_string(f.outcome)},
         {"cases", f.cases},     {"milliseconds", f.milliseconds}};
  if (!f.reproduce.empty()) out["reproduce"] = f.reproduce;
}

void from_json(const json& in, Finding& f) {
  f.check = in.at("check"), f.op = in.at("op"), f.impl = in.at("impl");
  f.device = in.at("device"), f.dtype = in.at("dtype"), f.name = in.at("case");
  f.message = in.at("message"), f.milliseconds = in.at("milliseconds");
  const std::string result = in.at("result");
  f.outcome = result == "pass"   ? Outcome::kPass
              : result == "fail" ? Outcome::kFail
                                 : Outcome::kUnsupported;
}

void to_json(json& out, const Speed& s) {
  out = {{"op", s.op},
         {"impl", s.impl},
         {"case", s.name},
         {"device", s.device},
         {"us", s.microseconds},
         {"GB_per_s", s.gigabytes_per_second},
         {"share_of_copy", s.share_of_copy}};
}

int Report::count(Outcome outcome) const {
  int n = 0;
  for (const Finding& f : findings)
    if (f.outcome == outcome) n += f.cases;
  return n;
}

namespace {

void print_refusals(const Report& r) {
  constexpr size_t kMost = 8;
  const std::vector<Refusal> all = refusals_of(r);
  if (!all.empty()) std::printf("\nnot supported:\n");
  for (size_t i = 0; i < std::min(all.size(), kMost); ++i)
    std::printf("  %5d  %s %s: %s\n", all[i].cases, all[i].op.c_str(), all[i].impl.c_str(),
                all[i].reason.c_str());
  if (all.size() > kMost)
    std::printf("  and %zu more reasons, which --html and --json have\n", all.size() - kMost);
}

}  // namespace

void print(const Report& r) {
  std::printf("%s\n\n", paint(Color::kBold, title_of(r)).c_str());
  size_t width = 18;
  for (const Finding& f : r.findings)
    if (f.op.empty()) width = std::max(width, f.name.size());
  for (const Finding& f : r.findings)
    if (f.op.empty() && f.outcome != Outcome::kFail)
      std::printf("  %-10s %-*s %s\n", f.check.c_str(), static_cast<int>(width), f.name.c_str(),
                  f.message.empty() ? to_string(f.outcome) : f.message.c_str());
  for (const auto& [part, why] : r.not_run)
    std::printf("  %s\n", paint(Color::kDim, part + ": not run: " + why).c_str());
  const Matrix matrix(r);
  if (!matrix.totals.empty()) {
    std::printf("\n");
    te_fl_tool::Table table({"op", "implementation", "passed", "failed", "not supported"});
    for (const auto& [key, t] : matrix.totals)
      table.add({key.first, key.second, paint(Color::kGreen, std::to_string(t.passed)),
                 t.failed > 0 ? paint(Color::kRed, std::to_string(t.failed)) : "0",
                 std::to_string(t.unsupported)});
    table.print();
  }
  print_refusals(r);
  std::map<std::string, int> shown;
  for (const Finding& f : r.findings) {
    if (f.outcome != Outcome::kFail || ++shown[f.op.empty() ? f.check : f.op + ", " + f.check] > 5)
      continue;
    std::printf("\n%s  %s\n      %s\n      %s\n", paint(Color::kRed, "FAIL").c_str(),
                finding_label(f).c_str(), f.message.c_str(), f.reproduce.c_str());
  }
  for (const auto& [key, n] : shown)
    if (n > 5) std::printf("\n%d more failures of %s\n", n - 5, key.c_str());
  const Color color = r.certified()                  ? Color::kGreen
                      : r.count(Outcome::kFail) == 0 ? Color::kYellow
                                                     : Color::kRed;
  std::printf("\n%s: %s, seed %llu, %s s\n", paint(color, verdict_of(r)).c_str(),
              describe_counts(r).c_str(), static_cast<unsigned long long>(r.seed),
              fixed(r.seconds, 1).c_str());
  if (const std::string shortfall = describe_shortfall(r); !shortfall.empty())
    std::printf("  %s\n", shortfall.c_str());
}

namespace {
json devices_json(const Report& r) {
  json all = json::array();
  for (const DeviceFacts& d : r.devices)
    all.push_back({{"name", d.name}, {"chip", d.chip}, {"driver", d.driver}});
  return all;
}
}  // namespace

std::string json_report(const Report& r) {
  json out = {{"plugin", r.plugin},
              {"name", r.name},
              {"vendor", r.vendor},
              {"version", r.version},
              {"build_id", r.build_id},
              {"path", r.path},
              {"devices", devices_json(r)},
              {"date", r.date},
              {"host", r.host},
              {"te_fl", r.te_fl},
              {"options", r.options},
              {"seed", r.seed},
              {"seconds", r.seconds},
              {"speed_seconds", r.speed_seconds},
              {"certified", r.certified()},
              {"verdict", verdict_of(r)},
              {"left_out", r.left_out},
              {"not_run", r.not_run},
              {"passed", r.count(Outcome::kPass)},
              {"failed", r.count(Outcome::kFail)},
              {"not_supported", r.count(Outcome::kUnsupported)},
              {"results", r.findings},
              {"speed", r.speeds}};
  return json_text(out, 1) + "\n";
}

std::string junit_text(const Report& r) {
  std::map<std::string, std::vector<const Finding*>> suites;
  for (const Finding& f : r.findings) suites[f.op.empty() ? f.check : f.op].push_back(&f);
  std::string out = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites name=\"te-fl check " +
                    escaped(title_of(r)) + "\" tests=\"" + std::to_string(r.findings.size()) +
                    "\" failures=\"" + std::to_string(r.count(Outcome::kFail)) + "\" time=\"" +
                    fixed(r.seconds, 3) + "\">\n";
  for (const auto& [name, findings] : suites) {
    const auto count = [&all = findings](Outcome outcome) {
      const auto alike = [&](const Finding* f) { return f->outcome == outcome; };
      return std::to_string(std::count_if(all.begin(), all.end(), alike));
    };
    out += " <testsuite name=\"" + escaped(name) + "\" tests=\"" + std::to_string(findings.size()) +
           "\" timestamp=\"" + r.date + "\" failures=\"" + count(Outcome::kFail) + "\" skipped=\"" +
           count(Outcome::kUnsupported) + "\">\n";
    for (const Finding* f : findings) {
      out += "  <testcase classname=\"" + escaped(f->impl.empty() ? f->check : f->impl) +
             "\" name=\"" + escaped(finding_label(*f)) + "\" time=\"" +
             fixed(f->milliseconds / 1000, 6) + "\"";
      if (f->outcome == Outcome::kPass) {
        out += "/>\n";
        continue;
      }
      const bool failed = f->outcome == Outcome::kFail;
      out += failed ? "><failure message=\"" : "><skipped message=\"";
      out += escaped(f->message) + "\"";
      out += failed ? ">" + escaped(f->reproduce) + "</failure></testcase>\n" : "/></testcase>\n";
    }
    out += " </testsuite>\n";
  }
  return out + "</testsuites>\n";
}

namespace {

constexpr const char* kHead = R"html(<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>te-fl check</title><style>
body{font:14px/1.5 system-ui,sans-serif;margin:2em auto;max-width:80em;padding:0 1em;color:#222;background:#fff}
table{border-collapse:collapse;margin:1em 0}th,td{border:1px solid #ccc;padding:.2em .6em;text-align:left}
th{background:#f3f3f3;position:sticky;top:0}.pass{background:#dff3df}.fail{background:#f8d4d4}.none{color:#888}
code,pre{font-family:ui-monospace,monospace;font-size:13px}pre{white-space:pre-wrap;margin:.2em 0}
@media (prefers-color-scheme:dark){body{color:#ddd;background:#181818}th{background:#282828}th,td{border-color:#444}
.pass{background:#1d3a1d}.fail{background:#4a1f1f}}
</style></head><body>
)html";

const char* class_of(Outcome outcome) {
  return outcome == Outcome::kPass ? "pass" : outcome == Outcome::kFail ? "fail" : "none";
}

std::string cell(const Tally& t) {
  const char* kind = t.failed > 0 ? "fail" : t.passed > 0 ? "pass" : "none";
  return std::string("<td class=\"") + kind + "\">" + describe_tally(t) + "</td>";
}

std::string matrix_html(const Report& r) {
  const Matrix matrix(r);
  if (matrix.totals.empty()) return {};
  std::string out = "<h2>Support</h2>\n<table><tr><th>op</th><th>implementation</th><th>all</th>";
  for (const std::string& d : matrix.dtypes) out += "<th>" + escaped(d) + "</th>";
  out += "</tr>\n";
  for (const auto& [key, total] : matrix.totals) {
    out +=
        "<tr><td>" + escaped(key.first) + "</td><td>" + escaped(key.second) + "</td>" + cell(total);
    const auto row = matrix.rows.find(key);
    for (const std::string& d : matrix.dtypes) {
      const bool known = row != matrix.rows.end() && row->second.count(d) != 0;
      out += cell(known ? row->second.at(d) : Tally{});
    }
    out += "</tr>\n";
  }
  return out + "</table>\n";
}

std::string failures_html(const Report& r) {
  if (r.count(Outcome::kFail) == 0) return {};
  std::string out = "<h2>Failures</h2>\n<table><tr><th>what</th><th>found</th></tr>\n";
  for (const Finding& f : r.findings)
    if (f.outcome == Outcome::kFail)
      out += "<tr><td class=\"fail\">" + escaped(finding_label(f)) + "</td><td>" +
             escaped(f.message) + "<pre>" + escaped(f.reproduce) + "</pre></td></tr>\n";
  return out + "</table>\n";
}

std::string speed_html(const Report& r) {
  if (r.speeds.empty()) return {};
  std::string out =
      "<h2>Speed</h2>\n<p>Medians over 0.05 s each, memory cold; GB/s counts every byte that has "
      "to "
      "move once; the last column holds that against a copy on the same device.</p>\n"
      "<table><tr><th>op</th><th>case</th><th>implementation</th><th>device</th><th>us</th>"
      "<th>GB/s</th><th>of a copy</th></tr>\n";
  for (const Speed& s : r.speeds)
    out += "<tr><td>" + escaped(s.op) + "</td><td>" + escaped(s.name) + "</td><td>" +
           escaped(s.impl) + "</td><td>" + escaped(s.device) + "</td><td>" +
           fixed(s.microseconds, 1) + "</td><td>" + fixed(s.gigabytes_per_second, 1) + "</td><td>" +
           fixed(s.share_of_copy, 2) + "</td></tr>\n";
  return out + "</table>\n";
}

}  // namespace

namespace {

std::string refusals_html(const Report& r) {
  const std::vector<Refusal> all = refusals_of(r);
  if (all.empty()) return {};
  std::string out =
      "<h2>Not supported</h2>\n<table><tr><th>op</th><th>implementation</th><th>cases</th>"
      "<th>reason</th><th>for example</th></tr>\n";
  for (const Refusal& f : all)
    out += "<tr><td>" + escaped(f.op) + "</td><td>" + escaped(f.impl) + "</td><td>" +
           std::to_string(f.cases) + "</td><td>" + escaped(f.reason) + "</td><td>" +
           escaped(f.example) + "</td></tr>\n";
  return out + "</table>\n";
}

std::string run_html(const Report& r) {
  std::string out = "<h2>Run</h2>\n<table>\n";
  const auto row = [&](const char* name, const std::string& value) {
    if (!value.empty())
      out += std::string("<tr><th>") + name + "</th><td>" + escaped(value) + "</td></tr>\n";
  };
  row("plugin", r.plugin), row("version", r.version), row("build", r.build_id);
  row("date", r.date), row("te-fl", r.te_fl), row("host", r.host), row("options", r.options);
  for (const DeviceFacts& d : r.devices)
    row("device", d.name + ": " + d.chip + (d.driver.empty() ? "" : ", " + d.driver));
  row("took", fixed(r.seconds, 1) + " s");
  return out + "</table>\n";
}

}  // namespace

std::string html_text(const Report& r) {
  std::string out = kHead;
  const char* kind = r.certified() ? "pass" : r.count(Outcome::kFail) > 0 ? "fail" : "none";
  const std::string shortfall = describe_shortfall(r);
  out += "<h1>" + escaped(title_of(r)) + "</h1>\n<p class=\"" + kind + "\"><strong>" +
         verdict_of(r) + "</strong>: " + describe_counts(r) +
         (shortfall.empty() ? "" : "<br>" + escaped(shortfall)) + "</p>\n" + run_html(r);
  out += "<h2>Plugin</h2>\n<table>\n";
  for (const Finding& f : r.findings)
    if (f.op.empty())
      out += "<tr><td>" + escaped(f.check) + "</td><td>" + escaped(f.name) + "</td><td class=\"" +
             class_of(f.outcome) + "\">" +
             escaped(f.message.empty() ? to_string(f.outcome) : f.message) + "</td></tr>\n";
  for (const auto& [part, why] : r.not_run)
    out += "<tr><td>" + escaped(part) +
           "</td><td></td><td class=\"none\">not run: " + escaped(why) + "</td></tr>\n";
  out += "</table>\n" + failures_html(r) + matrix_html(r) + refusals_html(r) + speed_html(r);
  return out + "</body></html>\n";
}

}  // namespace te_fl_tool::check
