// Dropout's random decisions for the elements of a tensor.
#pragma once

#include <array>
#include <cstdint>

#include "te_fl/backend.hpp"
#include "te_fl/numeric/philox.hpp"

namespace te_fl::reference {

// keep(i) returns true if dropout keeps element i of the logical tensor. It is fast if i increases
// by one per call. Each thread needs its own object.
class DropoutStream {
 public:
  DropoutStream(const te_fl_rng& rng, float p)
      : random_(rng), threshold_(numeric::dropout_threshold(p)) {}

  bool keep(uint64_t i) {
    if (threshold_ == 0) return true;
    if (i / 4 != block_index_) {
      block_index_ = i / 4;
      block_ = numeric::philox4x32(random_.seed, random_.offset + block_index_);
    }
    return block_[i % 4] >= threshold_;
  }

 private:
  backend::RandomState random_;
  uint64_t threshold_;
  uint64_t block_index_ = ~uint64_t{0};  // no block yet: i / 4 never has this value
  std::array<uint32_t, 4> block_{};
};

}  // namespace te_fl::reference
