#pragma once

#include <cstdint>
#include <string>

#include "te_fl/status.hpp"

namespace train_gpt {

// Holds the options of the command line. Members whose default depends on the device are 0, -1 or
// empty until fill_defaults().
struct Options {
  std::string data;  // empty: build/data/text.txt beside the program
  std::string recipe = "delayed";
  std::string style = "llama";
  std::string dtype;
  std::string device = "auto";
  std::string load;
  std::string save;
  std::string json;
  std::string plot;
  std::string prompt = "The ";
  int64_t steps = -1;
  int64_t batch = 0;
  int64_t microbatches = 1;
  int64_t seq_len = 0;
  int64_t hidden = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t groups = 0;
  int64_t tp = 1;  // ranks that divide the layers
  int64_t dp = 1;  // ranks that divide the batch
  bool sp = false;
  bool zero = false;  // the ranks of dp divide the optimizer's state
  int64_t sample_bytes = 300;
  int64_t eval_batches = 32;
  int64_t report_every = 100;
  double lr = 0;
  double dropout = 0.0;
  double temperature = 0.7;
  uint64_t seed = 1;
  bool chart = false;
  bool graph = false;
  bool fp8_attention = false;
  bool fp8_weights = false;
};

// Parses the command line. Returns true to go on; false to stop with *exit_code (help, or an error
// already told).
bool parse_options(int argc, char** argv, Options& options, int* exit_code);
// Sets what the command line left open: a model that 2 cores train in half a minute or, if a device
// serves the model's ops itself (`native`), one for a GPU.
void fill_defaults(Options& options, bool native);
// Checks that the options go together; INVALID_ARGUMENT names those that do not.
te_fl::Status check(const Options& options);

}  // namespace train_gpt
