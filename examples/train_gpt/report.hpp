#pragma once

#include <string>
#include <vector>

#include "options.hpp"

namespace train_gpt {

struct Results {
  std::vector<double> training_loss;  // per step, nats per byte
  double validation_loss = 0;
  double seconds = 0;  // of the training steps only
  double tokens_per_s = 0;
  double peak_mib = 0;         // of the process
  double device_peak_mib = 0;  // device memory that te-fl held; 0 on the host
  int64_t parameters = 0;
  std::string sample;
};

// Returns the process's peak resident memory so far, in MiB.
double peak_memory_mib();
// Prints the implementations that ran each op, the number of calls, and the cost of staging
// copies between another device and the host; from OpManager::usage().
void print_usage_table();
// Escapes characters that a terminal would not display.
std::string printable(const std::string& text);
// Returns the text of --json's file. `device` is the name of the device used.
std::string json_text(const Options& options, const std::string& device, const Results& results);

}  // namespace train_gpt
