#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

namespace train_gpt {

// Inputs and targets of a batch: I32 [batch, seq_len] each; the targets are the inputs shifted by
// one byte.
struct Batch {
  te_fl::Tensor inputs;
  te_fl::Tensor targets;
};

// One rank's part of a batch that is divided into `count` equal parts.
struct Part {
  int64_t index = 0, count = 1;
};

// A text cut into a training part (the first nine tenths) and a held-out part.
class Text {
 public:
  // Errors name the file and the problem: missing, unreadable, empty, or one part is shorter than
  // seq_len + 1 bytes.
  static te_fl::Result<Text> load(const std::string& path, int64_t seq_len);
  // Returns one step's batch of random windows, or a part of it. Equal (seed, step) give equal
  // batches on every machine.
  te_fl::Result<Batch> training(uint64_t seed, int64_t step, int64_t batch, te_fl::Device device,
                                Part part = {}) const;
  // Returns batch `index` of `count`, of windows spread evenly over the held-out part.
  te_fl::Result<Batch> held_out(int64_t index, int64_t count, int64_t batch, te_fl::Device device,
                                Part part = {}) const;
  size_t training_bytes() const { return split_; }
  size_t held_out_bytes() const { return bytes_.size() - split_; }

 private:
  te_fl::Result<Batch> gather(const std::vector<size_t>& starts, te_fl::Device device) const;
  std::string bytes_;
  size_t split_ = 0;
  int64_t seq_len_ = 0;
};

// A counter-based random generator for choices on the host: splitmix64 of (seed, counter).
uint64_t mix(uint64_t seed, uint64_t counter);

}  // namespace train_gpt
