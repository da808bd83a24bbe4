#pragma once

#include <cstdint>
#include <string>

namespace train_gpt {

struct Options {
  std::string data;  // empty: build/data/text.txt beside the program
  std::string recipe = "delayed";
  std::string style = "gpt";
  std::string dtype = "f32";
  std::string device = "cpu";
  std::string load;
  std::string save;
  std::string json;
  std::string prompt = "The ";
  int64_t steps = 300;
  int64_t batch = 8;
  int64_t microbatches = 1;
  int64_t seq_len = 128;
  int64_t hidden = 256;
  int64_t layers = 4;
  int64_t heads = 8;
  int64_t groups = 0;
  int64_t sample_bytes = 300;
  int64_t eval_batches = 16;
  int64_t report_every = 25;
  double lr = 1.5e-3;
  double dropout = 0.0;
  double temperature = 0.8;
  uint64_t seed = 1;
  bool graph = false;
  bool fp8_attention = false;
};

// Parses the command line. Returns true to go on; false to stop with *exit_code (help, or an error
// already told).
bool parse_options(int argc, char** argv, Options& options, int* exit_code);

}  // namespace train_gpt
