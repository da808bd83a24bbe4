#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "commands.hpp"
#include "conformance/check/output.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl_tool {
namespace {

void print(const char* against, const std::vector<std::string>& differences, int compared) {
  if (differences.empty()) {
    std::printf("against %s: %s (%d outputs and parts compared)\n", against,
                paint(Color::kGreen, "agrees").c_str(), compared);
    return;
  }
  std::printf("against %s: %s\n", against, paint(Color::kRed, "differs").c_str());
  for (const std::string& d : differences) std::printf("  %s\n", d.c_str());
}

// Returns the exit code for an error: kUsage if the file is not a saved call or if --impl or
// --device is misspelt, which the user can correct; otherwise the code for a call that failed.
int failed(const ReplayOptions& options, const te_fl::Status& status) {
  using te_fl::StatusCode;
  complain(status.to_string());
  if (options.json) {
    const nlohmann::json out = {
        {"file", options.file},
        {"error", {{"code", te_fl::to_string(status.code())}, {"message", status.to_string()}}}};
    std::printf("%s\n", json_text(out).c_str());
  }
  const bool usage = status.code() == StatusCode::kNotFound ||
                     status.code() == StatusCode::kDataLoss ||
                     status.code() == StatusCode::kInvalidArgument;
  return usage ? kUsage : kProblem;
}

}  // namespace

int replay(const ReplayOptions& options) {
  std::error_code unknown;
  const auto kind = std::filesystem::status(options.file, unknown).type();
  if (std::filesystem::exists(std::filesystem::file_status(kind)) &&
      kind != std::filesystem::file_type::regular) {
    return failed(options, te_fl::invalid_argument(options.file +
                                                   (kind == std::filesystem::file_type::directory
                                                        ? " is a folder"
                                                        : " is a device, a pipe or a socket") +
                                                   "; name a saved call"));
  }
  const auto r = te_fl::replay(options.file, options.impl, options.device);
  if (!r.ok()) return failed(options, r.status());
  if (options.json) {
    const nlohmann::json out = {{"op", r->op},
                                {"impl_id", r->impl_id},
                                {"device", r->device},
                                {"saved_by", r->saved_by},
                                {"note", r->note},
                                {"compared", r->compared},
                                {"from_saved", r->from_saved},
                                {"from_reference", r->from_reference}};
    std::printf("%s\n", json_text(out).c_str());
  } else {
    std::printf("%s on %s, %s\n", paint(Color::kBold, r->op).c_str(), r->impl_id.c_str(),
                r->device.c_str());
    std::printf("saved by %s\nfound then: %s\n", r->saved_by.c_str(), r->note.c_str());
    print("the saved results", r->from_saved, r->compared);
    print("the reference", r->from_reference, r->compared);
  }
  return r->from_reference.empty() ? kSuccess : kProblem;
}

}  // namespace te_fl_tool
