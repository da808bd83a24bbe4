// te-fl tune: the fastest implementation for each op and signature of a run, as a policy file.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "commands.hpp"
#include "output.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl_tool {
namespace {

using nlohmann::json;

std::string token_text(const te_fl::PolicyToken& token) {
  if (token.type == te_fl::PolicyToken::Type::kImpl) return "impl:" + token.name;
  return std::string(te_fl::to_string(token.kind));
}

json entry_of(const te_fl::TunedSignature& row) {
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
  return {{"op", row.list.op}, {"device", row.list.device},
          {"dtypes", dtypes},  {"scalings", scalings},
          {"use", use},        {"note", note}};
}

}  // namespace

int tune(const TuneOptions& options) {
  std::vector<std::string> left_out;
  const auto rows = te_fl::tune(options.files, options.seconds, &left_out);
  if (!rows.ok()) {
    complain(rows.status().to_string());
    return kUsage;
  }
  for (const std::string& reason : left_out) complain("left out: " + reason);
  json out = {{"te_fl_policy", 1}, {"per_signature", json::array()}};
  Table table({"op", "device", "calls", "fastest", "us", "next", "us"});
  const auto us = [](const te_fl::TunedSignature& row, size_t i) {
    char text[32];
    std::snprintf(text, sizeof text, "%.2f",
                  1e6 * row.times[i].seconds / static_cast<double>(row.count));
    return std::string(text);
  };
  for (const te_fl::TunedSignature& row : *rows) {
    if (row.times.empty()) continue;
    out["per_signature"].push_back(entry_of(row));
    const bool two = row.times.size() > 1;
    table.add({row.list.op, row.list.device, std::to_string(row.count), row.times[0].impl_id,
               us(row, 0), two ? row.times[1].impl_id : "", two ? us(row, 1) : ""});
  }
  if (options.out.empty()) {
    std::printf("%s\n", out.dump(2).c_str());
    return kSuccess;
  }
  const std::string temporary = options.out + ".part";
  std::ofstream file(temporary, std::ios::trunc);
  file << out.dump(2) << "\n";
  file.close();
  if (!file.good() || std::rename(temporary.c_str(), options.out.c_str()) != 0) {
    complain("cannot write " + options.out + ": " + std::strerror(errno));
    return kProblem;
  }
  table.print();
  std::printf("\nTE_FL_POLICY_FILE=%s uses it.\n", options.out.c_str());
  return kSuccess;
}

}  // namespace te_fl_tool
