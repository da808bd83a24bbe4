#pragma once

#include <cstdint>
#include <string>

#include "te_fl/status.hpp"

namespace train_gpt {

// Command-line options. Members whose default depends on the device are 0, -1 or empty until
// fill_defaults() runs.
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
  int64_t experts = 0;  // of each layer; 0: an MLP
  int64_t top_k = 2;    // experts of each token
  int64_t tp = 1;       // tensor-parallel ranks
  int64_t dp = 1;       // data-parallel ranks
  bool sp = false;
  bool zero = false;  // the data-parallel ranks shard the optimizer's state (ZeRO-1)
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

// Parses the command line. Returns true to continue; false to stop with *exit_code, after help or
// an error message was printed.
bool parse_options(int argc, char** argv, Options& options, int* exit_code);
// Sets the options that the command line left open: for a model that 2 cores train in half a minute
// or, if the device has its own implementations of the model's ops (`native`), for a GPU-sized
// model.
void fill_defaults(Options& options, bool native);
// Checks that the options are compatible; INVALID_ARGUMENT names those that are not.
te_fl::Status check(const Options& options);

}  // namespace train_gpt
