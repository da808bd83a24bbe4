#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "curve.hpp"
#include "device.hpp"
#include "options.hpp"
#include "progress.hpp"
#include "ranks.hpp"
#include "report.hpp"
#include "trainer.hpp"

namespace train_gpt {
namespace {

using te_fl::Result;
using te_fl::Status;

// Checks before the training that a file can be written, and leaves an existing file unchanged. A
// checkpoint is written to a file next to its path and then renamed (`beside`), so the check
// creates such a file; other files are opened in place.
Status check_writable(const char* option, const std::string& path, bool beside) {
  if (path.empty()) return {};
  std::error_code error;
  const std::string probe = beside ? path + ".probe." + std::to_string(getpid()) : path;
  const bool folder = std::filesystem::is_directory(path, error);
  // Renaming the complete file to this path would replace the device.
  if (beside && !folder && std::filesystem::exists(path, error) &&
      !std::filesystem::is_regular_file(path, error)) {
    return te_fl::invalid_argument(std::string(option) + " " + path +
                                   " is a device, a pipe or a socket; name a file");
  }
  const bool there = std::filesystem::exists(probe, error);
  const bool good = !folder && std::ofstream(probe, std::ios::app).good();
  const int reason = folder ? EISDIR : errno;
  if (good && !there) std::filesystem::remove(probe, error);
  if (good) return {};
  return te_fl::invalid_argument(std::string(option) + " " + path +
                                 " cannot be written: " + std::strerror(reason) +
                                 "; name a file in a folder that you may write to");
}

Status write_file(const char* option, const std::string& path, const std::string& content) {
  std::ofstream file(path);
  file << content;
  if (file.flush()) return {};
  return te_fl::internal_error(std::string(option) + " " + path +
                               " could not be written: " + std::strerror(errno));
}

void print_heading(const Options& options, const DeviceChoice& choice, const Trainer& trainer) {
  const auto properties = te_fl::devices::properties(choice.device);
  std::printf("device %s", choice.name.c_str());
  if (properties.ok() && properties->name[0] != 0) std::printf(" (%s)", properties->name);
  std::printf(": %s\n", choice.reason.c_str());
  std::printf("%s-style GPT, %.2f M parameters, %lld layers of %lld, context %lld bytes\n",
              options.style.c_str(), static_cast<double>(trainer.parameters()) / 1e6,
              static_cast<long long>(options.layers), static_cast<long long>(options.hidden),
              static_cast<long long>(options.seq_len));
  std::printf("recipe %s%s, %s; %lld steps of %lld bytes; %zu training and %zu held-out bytes\n",
              options.recipe.c_str(), options.fp8_attention ? " with FP8 attention" : "",
              options.dtype.c_str(), static_cast<long long>(options.steps),
              static_cast<long long>(options.batch * options.seq_len * options.microbatches),
              trainer.text().training_bytes(), trainer.text().held_out_bytes());
  std::fflush(stdout);
}

Status train(const Options& options, Trainer& trainer, Results& results) {
  const double tokens_per_step =
      static_cast<double>(options.batch * options.seq_len * options.microbatches);
  Progress progress(options.steps, tokens_per_step, options.report_every);
  for (int64_t i = 0; i < options.steps; ++i) {
    TE_FL_ASSIGN_OR_RETURN(const double loss, trainer.step(i));
    results.training_loss.push_back(loss);
    progress.step(i + 1, loss);
  }
  results.seconds = progress.seconds();
  results.tokens_per_s =
      options.steps > 0 ? tokens_per_step * static_cast<double>(options.steps) / results.seconds
                        : 0;
  return {};
}

// Prints the loss curve in the terminal and writes --plot's file.
Status draw(const Options& options, const DeviceChoice& choice, const Results& results) {
  const Curve curve{results.training_loss, results.validation_loss,
                    options.style + "-style GPT, recipe " + options.recipe + ", on " + choice.name};
  if (options.chart || on_terminal()) std::printf("\n%s", chart(curve).c_str());
  if (options.plot.empty()) return {};
  TE_FL_RETURN_IF_ERROR(write_file("--plot", options.plot, svg(curve)));
  std::printf("drew the loss curve: %s\n", options.plot.c_str());
  return {};
}

// Only the first of several ranks prints and writes files.
Status silence(const Ranks& ranks, Options& options) {
  if (ranks.first()) return {};
  options.plot.clear();
  options.json.clear();
  if (std::freopen("/dev/null", "w", stdout) != nullptr) return {};
  return te_fl::internal_error("/dev/null could not be opened");
}

Status run(Options options, const DeviceChoice& choice) {
  TE_FL_ASSIGN_OR_RETURN(const Ranks ranks, Ranks::create(options, choice.device));
  TE_FL_RETURN_IF_ERROR(silence(ranks, options));
  TE_FL_RETURN_IF_ERROR(check_writable("--save", options.save, true));
  TE_FL_RETURN_IF_ERROR(check_writable("--plot", options.plot, false));
  TE_FL_RETURN_IF_ERROR(check_writable("--json", options.json, false));
  TE_FL_ASSIGN_OR_RETURN(const std::unique_ptr<Trainer> trainer,
                         Trainer::create(options, choice.device, ranks));
  Results results;
  results.parameters = trainer->parameters();
  print_heading(options, choice, *trainer);
  print_collectives(ranks);
  TE_FL_RETURN_IF_ERROR(train(options, *trainer, results));
  TE_FL_ASSIGN_OR_RETURN(results.validation_loss, trainer->validate());
  std::printf("validation loss %.4f nats/byte (%.3f bits/byte) on held-out text\n",
              results.validation_loss, results.validation_loss / std::log(2.0));
  TE_FL_RETURN_IF_ERROR(draw(options, choice, results));
  if (!options.save.empty()) {
    TE_FL_RETURN_IF_ERROR(trainer->save());
    std::printf("saved %s\n", options.save.c_str());
  }
  if (options.sample_bytes > 0) {
    TE_FL_ASSIGN_OR_RETURN(results.sample, trainer->sample());
    std::printf("\nA sample\n--------\n%s\n--------\n", printable(results.sample).c_str());
  }
  print_usage_table();
  results.peak_mib = peak_memory_mib();
  std::printf("\ntrained %lld steps in %.1f s, peak memory %.0f MiB",
              static_cast<long long>(options.steps), results.seconds, results.peak_mib);
  if (!choice.device.is_host()) {
    TE_FL_ASSIGN_OR_RETURN(const auto account, te_fl::devices::memory_account(choice.device));
    results.device_peak_mib = static_cast<double>(account.peak_bytes) / (1 << 20);
    std::printf(", on %s %.0f MiB", choice.name.c_str(), results.device_peak_mib);
  }
  std::printf("\n");
  if (options.json.empty()) return {};
  return write_file("--json", options.json, json_text(options, choice.name, results));
}

}  // namespace
}  // namespace train_gpt

int main(int argc, char** argv) {
  train_gpt::Options options;
  int exit_code = 0;
  if (!train_gpt::parse_options(argc, argv, options, &exit_code)) return exit_code;
  const auto failed = [](const te_fl::Status& status, int code) {
    std::fprintf(stderr, "train_gpt: %s\n", status.to_string().c_str());
    return code;
  };
  const auto choice = train_gpt::choose_device(options.device);
  if (!choice.ok()) return failed(choice.status(), 1);
  train_gpt::fill_defaults(options, choice->native);
  if (const auto status = train_gpt::check(options); !status.ok()) return failed(status, 2);
  const te_fl::Status status = train_gpt::run(options, *choice);
  return status.ok() ? 0 : failed(status, 1);
}
