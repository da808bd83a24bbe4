#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "commands.hpp"
#include "conformance/check/output.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl_tool {
namespace {

constexpr size_t kMaxBytes = size_t{16} << 20;
constexpr const char* kWayOut = "; files are compared that `te-fl info --fingerprint` printed";

// Reads a file or a pipe: `te-fl fingerprint diff rank0 <(te-fl info --fingerprint)`.
te_fl::Result<std::string> read(const std::string& path) {
  errno = 0;
  std::ifstream in(path);
  std::string text(kMaxBytes, '\0');
  // Opening a folder succeeds; the first read of it fails.
  if (in) in.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!in.is_open() || in.bad()) {
    return te_fl::not_found("cannot read " + path + ": " + std::strerror(errno) + kWayOut);
  }
  text.resize(static_cast<size_t>(in.gcount()));
  if (!text.starts_with("fingerprint = ") || text.size() == kMaxBytes) {
    return te_fl::invalid_argument(path + " is not what `te-fl info --fingerprint` prints" +
                                   kWayOut);
  }
  return text;
}

// The lines of a table by their keys, without its hash.
std::map<std::string, std::string> parse(const std::string& table) {
  std::map<std::string, std::string> lines;
  std::istringstream in(table);
  for (std::string line; std::getline(in, line);) {
    const size_t equals = line.find(" = ");
    if (equals == std::string::npos || line.rfind("fingerprint = ", 0) == 0) continue;
    lines[line.substr(0, equals)] = line.substr(equals + 3);
  }
  return lines;
}

int diff_two(const std::string& a, const std::string& b, bool as_json) {
  const auto differences = te_fl::fingerprint_difference(a, b);
  if (as_json) {
    const nlohmann::json out = {{"same", differences.empty()}, {"differences", differences}};
    std::printf("%s\n", json_text(out).c_str());
    return differences.empty() ? kSuccess : kProblem;
  }
  for (const std::string& d : differences) std::printf("%s\n", d.c_str());
  if (differences.empty()) std::printf("the two are the same\n");
  return differences.empty() ? kSuccess : kProblem;
}

// The files that have one value of a key. An absent key counts as a value of its own.
struct Group {
  std::optional<std::string> value;
  std::vector<size_t> files;
};

// Groups the files by their value of the key, the largest group first; of equal groups, the one
// with the earliest file.
std::vector<Group> group_by_value(const std::vector<std::map<std::string, std::string>>& lines,
                                  const std::string& key) {
  std::map<std::optional<std::string>, std::vector<size_t>> by_value;
  for (size_t i = 0; i < lines.size(); ++i) {
    const auto at = lines[i].find(key);
    by_value[at == lines[i].end() ? std::nullopt : std::optional(at->second)].push_back(i);
  }
  std::vector<Group> groups;
  for (auto& [value, files] : by_value) groups.push_back({value, std::move(files)});
  std::stable_sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) {
    return a.files.size() != b.files.size() ? a.files.size() > b.files.size()
                                            : a.files.front() < b.files.front();
  });
  return groups;
}

std::string value_text(const std::optional<std::string>& value) {
  return value.has_value() ? "'" + *value + "'" : "absent";
}

// Compares more than two files: what most of them have is compared with what the others have.
int diff_many(const std::vector<std::string>& files, const std::vector<std::string>& tables,
              bool as_json) {
  constexpr size_t kNamed = 8;  // maximum number of files that one line of text names
  std::vector<std::map<std::string, std::string>> lines;
  std::set<std::string> keys;
  for (const std::string& table : tables) {
    lines.push_back(parse(table));
    for (const auto& [key, value] : lines.back()) keys.insert(key);
  }
  std::set<size_t> unlike;  // the files that differ from most in some key
  nlohmann::json out = {{"same", true},
                        {"files", files.size()},
                        {"differ", nlohmann::json::array()},
                        {"differences", nlohmann::json::array()}};
  std::string text;
  for (const std::string& key : keys) {
    const std::vector<Group> groups = group_by_value(lines, key);
    if (groups.size() == 1) continue;
    text += key + ": " + value_text(groups[0].value) + " in " +
            std::to_string(groups[0].files.size()) + " of " + std::to_string(files.size()) + "\n";
    nlohmann::json others = nlohmann::json::array();
    for (size_t g = 1; g < groups.size(); ++g) {
      nlohmann::json names = nlohmann::json::array();
      std::string named;
      for (size_t i = 0; i < groups[g].files.size(); ++i) {
        const std::string& file = files[groups[g].files[i]];
        unlike.insert(groups[g].files[i]);
        names.push_back(file);
        if (i < kNamed) named += (i == 0 ? "" : ", ") + file;
      }
      if (groups[g].files.size() > kNamed)
        named += " and " + std::to_string(groups[g].files.size() - kNamed) + " more";
      text += "  " + value_text(groups[g].value) + " in " + named + "\n";
      others.push_back({{"value", groups[g].value ? nlohmann::json(*groups[g].value) : nullptr},
                        {"files", names}});
    }
    out["differences"].push_back(
        {{"key", key},
         {"most", groups[0].value ? nlohmann::json(*groups[0].value) : nullptr},
         {"others", others}});
  }
  for (const size_t i : unlike) out["differ"].push_back(files[i]);
  out["same"] = unlike.empty();
  if (as_json) {
    std::printf("%s\n", json_text(out).c_str());
  } else if (unlike.empty()) {
    std::printf("all %zu are the same\n", files.size());
  } else {
    std::printf("%s%zu of %zu files differ from the rest:", text.c_str(), unlike.size(),
                files.size());
    for (const size_t i : unlike) std::printf(" %s", files[i].c_str());
    std::printf("\n");
  }
  return unlike.empty() ? kSuccess : kProblem;
}

}  // namespace

int fingerprint(bool as_json) {
  const std::string table = te_fl::fingerprint_table();
  if (!as_json) {
    std::printf("%s", table.c_str());
    return kSuccess;
  }
  nlohmann::json out = nlohmann::json::object();
  size_t at = 0;
  while (at < table.size()) {
    const size_t end = table.find('\n', at), equals = table.find(" = ", at);
    out[table.substr(at, equals - at)] = table.substr(equals + 3, end - equals - 3);
    at = end + 1;
  }
  std::printf("%s\n", json_text(out).c_str());
  return kSuccess;
}

int fingerprint_diff(const std::vector<std::string>& files, bool as_json) {
  if (files.size() < 2) {
    complain("fingerprint diff compares at least two files" + std::string(kWayOut));
    return kUsage;
  }
  std::vector<std::string> tables;
  for (const std::string& file : files) {
    auto table = read(file);
    if (!table.ok()) {
      complain(table.status().to_string());
      return kUsage;
    }
    tables.push_back(std::move(table).value());
  }
  return files.size() == 2 ? diff_two(tables[0], tables[1], as_json)
                           : diff_many(files, tables, as_json);
}

}  // namespace te_fl_tool
