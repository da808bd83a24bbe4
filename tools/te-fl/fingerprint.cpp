#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "commands.hpp"
#include "conformance/check/output.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl_tool {
namespace {

constexpr size_t kMaxBytes = size_t{16} << 20;
constexpr const char* kWayOut = "; two files are compared that `te-fl info --fingerprint` printed";

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

int fingerprint_diff(const std::string& a, const std::string& b, bool as_json) {
  const auto first = read(a), second = read(b);
  for (const auto* r : {&first, &second}) {
    if (r->ok()) continue;
    complain(r->status().to_string());
    return kUsage;
  }
  const auto differences = te_fl::fingerprint_difference(*first, *second);
  if (as_json) {
    const nlohmann::json out = {{"same", differences.empty()}, {"differences", differences}};
    std::printf("%s\n", json_text(out).c_str());
    return differences.empty() ? kSuccess : kProblem;
  }
  for (const std::string& d : differences) std::printf("%s\n", d.c_str());
  if (differences.empty()) std::printf("the two are the same\n");
  return differences.empty() ? kSuccess : kProblem;
}

}  // namespace te_fl_tool
