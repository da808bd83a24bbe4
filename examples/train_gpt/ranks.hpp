#pragma once

#include <memory>
#include <string>
#include <vector>

#include "options.hpp"
#include "te_fl/comm.hpp"
#include "te_fl/nn.hpp"

namespace train_gpt {

// The ranks of the job in two dimensions: --tp neighbouring ranks share the layers (tensor
// parallel), and ranks --tp apart share the batch (data parallel). A single rank has no
// communicators.
struct Ranks {
  // Creates the communicators. Every rank of the job must call it. INVALID_ARGUMENT unless --tp
  // times --dp equals the number of ranks.
  static te_fl::Result<Ranks> create(const Options& options, const te_fl::Device& device);

  int rank() const { return world == nullptr ? 0 : world->rank(); }
  int data_rank() const { return data == nullptr ? 0 : data->rank(); }
  bool first() const { return rank() == 0; }  // true on the rank that prints and writes files

  std::shared_ptr<const te_fl::Comm> world, data;
  te_fl::nn::TensorParallel tensor;
  std::shared_ptr<te_fl::nn::AmaxReduction> amaxes;  // amax reduction over all ranks
};

// Averages each loss, F32 [1], over the data-parallel ranks, in place.
te_fl::Status average(const Ranks& ranks, const std::vector<te_fl::Tensor>& losses);
// Prints which implementation each collective uses, in one line.
void print_collectives(const Ranks& ranks);

}  // namespace train_gpt
