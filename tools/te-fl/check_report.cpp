// te-fl check: what it found, for a person, for a machine, and for a continuous-integration server.
#include <cstdio>
#include <map>
#include <set>

#include "check.hpp"
#include "output.hpp"

namespace te_fl_tool::check {
namespace {

using nlohmann::json;

struct Tally {
  int passed = 0, failed = 0, unsupported = 0;
  void count(const Finding& f) {
    ++(f.outcome == Outcome::kPass ? passed : f.outcome == Outcome::kFail ? failed : unsupported);
  }
};

// op and implementation -> dtype -> tally. Findings without a dtype count in no column.
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

std::string text_of(const Tally& t) {
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
      out += '?';  // XML has no such characters
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

std::string verdict_of(const Report& r) {
  return std::to_string(r.count(Outcome::kPass)) + " passed, " +
         std::to_string(r.count(Outcome::kFail)) + " failed, " +
         std::to_string(r.count(Outcome::kUnsupported)) + " not supported";
}

std::string label_of(const Finding& f) {
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
  out = {{"check", f.check},
         {"op", f.op},
         {"impl", f.impl},
         {"device", f.device},
         {"dtype", f.dtype},
         {"case", f.name},
         {"message", f.message},
         {"result", to_string(f.outcome)},
         {"milliseconds", f.milliseconds}};
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
  for (const Finding& f : findings) n += f.outcome == outcome;
  return n;
}

void print(const Report& r) {
  std::printf("%s\n\n", paint(Color::kBold, title_of(r)).c_str());
  for (const Finding& f : r.findings)
    if (f.op.empty() && f.outcome != Outcome::kFail)
      std::printf("  %-10s %-18s %s\n", f.check.c_str(), f.name.c_str(), f.message.c_str());
  const Matrix matrix(r);
  if (!matrix.totals.empty()) {
    std::printf("\n");
    Table table({"op", "implementation", "passed", "failed", "not supported"});
    for (const auto& [key, t] : matrix.totals)
      table.add({key.first, key.second, paint(Color::kGreen, std::to_string(t.passed)),
                 t.failed > 0 ? paint(Color::kRed, std::to_string(t.failed)) : "0",
                 std::to_string(t.unsupported)});
    table.print();
  }
  std::map<std::string, int> shown;
  for (const Finding& f : r.findings) {
    if (f.outcome != Outcome::kFail || ++shown[f.op.empty() ? f.check : f.op + ", " + f.check] > 5)
      continue;
    std::printf("\n%s  %s\n      %s\n      %s\n", paint(Color::kRed, "FAIL").c_str(),
                label_of(f).c_str(), f.message.c_str(), f.reproduce.c_str());
  }
  for (const auto& [key, n] : shown)
    if (n > 5) std::printf("\n%d more failures of %s\n", n - 5, key.c_str());
  const bool good = r.count(Outcome::kFail) == 0;
  std::printf(
      "\n%s: %s, %s s\n",
      paint(good ? Color::kGreen : Color::kRed, good ? "certified" : "not certified").c_str(),
      verdict_of(r).c_str(), fixed(r.seconds, 1).c_str());
}

std::string json_text(const Report& r) {
  json out = {{"plugin", r.plugin},
              {"name", r.name},
              {"vendor", r.vendor},
              {"version", r.version},
              {"build_id", r.build_id},
              {"path", r.path},
              {"devices", r.devices},
              {"seed", r.seed},
              {"seconds", r.seconds},
              {"speed_seconds", r.speed_seconds},
              {"certified", r.count(Outcome::kFail) == 0},
              {"passed", r.count(Outcome::kPass)},
              {"failed", r.count(Outcome::kFail)},
              {"not_supported", r.count(Outcome::kUnsupported)},
              {"results", r.findings},
              {"speed", r.speeds}};
  // A plugin's words may be in any encoding.
  return out.dump(1, ' ', false, json::error_handler_t::replace) + "\n";
}

std::string junit_text(const Report& r) {
  std::map<std::string, std::vector<const Finding*>> suites;
  for (const Finding& f : r.findings) suites[f.op.empty() ? f.check : f.op].push_back(&f);
  std::string out = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites name=\"te-fl check " +
                    escaped(title_of(r)) + "\" tests=\"" + std::to_string(r.findings.size()) +
                    "\" failures=\"" + std::to_string(r.count(Outcome::kFail)) + "\" time=\"" +
                    fixed(r.seconds, 3) + "\">\n";
  for (const auto& [name, findings] : suites) {
    Tally t;
    for (const Finding* f : findings) t.count(*f);
    out += " <testsuite name=\"" + escaped(name) + "\" tests=\"" + std::to_string(findings.size()) +
           "\" failures=\"" + std::to_string(t.failed) + "\" skipped=\"" +
           std::to_string(t.unsupported) + "\">\n";
    for (const Finding* f : findings) {
      out += "  <testcase classname=\"" + escaped(f->impl.empty() ? f->check : f->impl) +
             "\" name=\"" + escaped(label_of(*f)) + "\" time=\"" +
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

std::string cell(const Tally& t) {
  const char* kind = t.failed > 0 ? "fail" : t.passed > 0 ? "pass" : "none";
  return std::string("<td class=\"") + kind + "\">" + text_of(t) + "</td>";
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
      out += "<tr><td class=\"fail\">" + escaped(label_of(f)) + "</td><td>" + escaped(f.message) +
             "<pre>" + escaped(f.reproduce) + "</pre></td></tr>\n";
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

std::string html_text(const Report& r) {
  const bool good = r.count(Outcome::kFail) == 0;
  std::string out = kHead;
  out += "<h1>" + escaped(title_of(r)) + "</h1>\n<p class=\"" + (good ? "pass" : "fail") +
         "\"><strong>" + (good ? "certified" : "not certified") + "</strong>: " + verdict_of(r) +
         "</p>\n<p><code>" + escaped(r.plugin) + "</code>, build " + escaped(r.build_id) +
         ", seed " + std::to_string(r.seed) + ", " + fixed(r.seconds, 1) + " s</p>\n";
  out += "<h2>Plugin</h2>\n<table>\n";
  for (const Finding& f : r.findings)
    if (f.op.empty())
      out += "<tr><td>" + escaped(f.check) + "</td><td>" + escaped(f.name) + "</td><td class=\"" +
             (f.outcome == Outcome::kFail ? "fail" : "pass") + "\">" + escaped(f.message) +
             "</td></tr>\n";
  out += "</table>\n" + failures_html(r) + matrix_html(r) + speed_html(r);
  return out + "</body></html>\n";
}

}  // namespace te_fl_tool::check
