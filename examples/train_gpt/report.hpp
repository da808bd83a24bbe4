#pragma once

#include <string>
#include <vector>

#include "options.hpp"

namespace train_gpt {

struct Results {
  std::vector<double> training_loss;  // per step, nats per byte
  double validation_loss = 0;
  double seconds = 0;  // of the training steps
  double tokens_per_s = 0;
  double peak_mib = 0;         // of the process
  double device_peak_mib = 0;  // that te-fl held on the device; 0 on the host
  int64_t parameters = 0;
  std::string sample;
};

// The process's largest resident size so far, MiB.
double peak_memory_mib();
// Prints which implementation served each op, how often, and what copying tensors of another device
// to the host for it has cost; from OpManager::usage().
void print_usage_table();
// Escapes what a terminal would not show.
std::string printable(const std::string& text);
// Makes what --json writes. `device` is the name of the one that was used.
std::string json_text(const Options& options, const std::string& device, const Results& results);

}  // namespace train_gpt
