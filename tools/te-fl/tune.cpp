// te-fl tune: finds the fastest implementation for each op and signature of a run and writes a
// policy file.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "commands.hpp"
#include "conformance/check/output.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl_tool {
namespace {

using nlohmann::json;

std::string token_text(const te_fl::PolicyToken& token) {
  if (token.type == te_fl::PolicyToken::Type::kImpl) return "impl:" + token.name;
  return std::string(te_fl::to_string(token.kind));
}

json to_json(const te_fl::TunedSignature& row) {
  json dtypes = json::array(), scalings = json::array(), use = json::array();
  std::string note;
  for (int i = 0; i < TE_FL_DTYPE_COUNT; ++i) {
    if ((row.list.dtypes >> i & 1) != 0)
      dtypes.push_back(te_fl::name(static_cast<te_fl::DType>(i)));
  }
  for (int i = 0; i < TE_FL_SCALING_COUNT; ++i) {
    if ((row.list.scalings >> i & 1) != 0)
      scalings.push_back(te_fl::name(static_cast<te_fl::Scaling>(i)));
  }
  for (const auto& token : row.list.use) use.push_back(token_text(token));
  for (const auto& t : row.times) {
    char text[64];
    std::snprintf(text, sizeof text, " %.3g us", 1e6 * t.seconds / static_cast<double>(row.count));
    note += (note.empty() ? "" : ", ") + t.impl_id + text;
  }
  return {{"op", row.list.op},
          {"device", row.list.device},
          {"dtypes", dtypes},
          {"scalings", scalings},
          {"bytes", {row.list.min_bytes, row.list.max_bytes}},
          {"use", use},
          {"note", note}};
}

// Checks that the output path can be written. Called before the timing, which takes minutes.
bool can_write(const std::string& path) {
  const std::string temporary = path + ".part";
  std::error_code error;
  // Refuses a device, pipe or socket: renaming the finished file to this path would replace it.
  if (std::filesystem::exists(path, error) && !std::filesystem::is_directory(path, error) &&
      !std::filesystem::is_regular_file(path, error)) {
    complain("cannot write " + path + " (--out): it is a device, a pipe or a socket");
    return false;
  }
  const bool folder = std::filesystem::is_directory(path, error);
  const bool good = !folder && std::ofstream(temporary, std::ios::trunc).good();
  const int reason = folder ? EISDIR : errno;
  if (good) std::filesystem::remove(temporary, error);
  if (!good) complain("cannot write " + path + " (--out): " + std::strerror(reason));
  return good;
}

}  // namespace

int tune(const TuneOptions& options) {
  if (!options.out.empty() && !can_write(options.out)) return kUsage;
  std::vector<std::string> left_out;
  const auto rows = te_fl::tune(options.files, options.seconds, &left_out);
  if (!rows.ok()) {
    complain(rows.status().to_string());
    return kUsage;
  }
  for (const std::string& reason : left_out) complain("left out: " + reason);
  json out = {{"te_fl_policy", 1}, {"per_signature", json::array()}};
  Table table({"op", "device", "bytes", "calls", "pinned", "fastest", "us", "next", "us"});
  const auto us = [](const te_fl::TunedSignature& row, size_t i) {
    char text[32];
    std::snprintf(text, sizeof text, "%.2f",
                  1e6 * row.times[i].seconds / static_cast<double>(row.count));
    return std::string(text);
  };
  const auto sizes = [](const te_fl::SignatureList& list) {
    return std::to_string(list.min_bytes) + ".." + std::to_string(list.max_bytes);
  };
  size_t left = 0;
  for (const te_fl::TunedSignature& row : *rows) {
    if (row.times.empty()) continue;
    const bool pinned = !row.list.use.empty();
    left += pinned ? 0 : 1;
    if (pinned) out["per_signature"].push_back(to_json(row));
    const bool two = row.times.size() > 1;
    table.add({row.list.op, row.list.device, sizes(row.list), std::to_string(row.count),
               pinned ? "yes" : "no", row.times[0].impl_id, us(row, 0),
               two ? row.times[1].impl_id : "", two ? us(row, 1) : ""});
  }
  // The policy is UTF-8, as are the traces, saved calls and ids of implementations in it, so dump()
  // has no bytes to replace.
  const std::string text = out.dump(2) + "\n";
  if (options.out.empty()) {
    std::printf("%s", text.c_str());
    return kSuccess;
  }
  const std::string temporary = options.out + ".part";
  std::ofstream file(temporary, std::ios::trunc);
  file << text;
  file.close();
  if (!file.good() || std::rename(temporary.c_str(), options.out.c_str()) != 0) {
    complain("cannot write " + options.out + ": " + std::strerror(errno));
    return kProblem;
  }
  table.print();
  if (left > 0) {
    std::printf(
        "\n%zu not pinned: what dispatch takes by itself is the fastest, or within the 5 %% "
        "or 100 ns of a call that are noise.\n",
        left);
  }
  std::printf("\nTE_FL_POLICY_FILE=%s uses it.\n", options.out.c_str());
  return kSuccess;
}

}  // namespace te_fl_tool
