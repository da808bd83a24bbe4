#pragma once

#include <memory>
#include <string>
#include <vector>

#include "options.hpp"
#include "te_fl/comm.hpp"
#include "te_fl/nn.hpp"

namespace train_gpt {

// The ranks of the job in two directions: neighbours divide the layers (--tp), and those that are
// --tp apart divide the batch (--dp). One rank has no communicators.
struct Ranks {
  // Called by every rank of the job. INVALID_ARGUMENT unless --tp times --dp is the number of
  // ranks.
  static te_fl::Result<Ranks> create(const Options& options, const te_fl::Device& device);

  int rank() const { return world == nullptr ? 0 : world->rank(); }
  int data_rank() const { return data == nullptr ? 0 : data->rank(); }
  bool first() const { return rank() == 0; }  // the one that prints and writes

  std::shared_ptr<const te_fl::Comm> world, data;
  te_fl::nn::TensorParallel tensor;
  std::shared_ptr<te_fl::nn::AmaxReduction> amaxes;  // over all ranks
};

// The means over the ranks that divide the batch, of F32 [1] each, in place.
te_fl::Status average(const Ranks& ranks, const std::vector<te_fl::Tensor>& losses);
// Prints which implementation serves each collective, in one line.
void print_collectives(const Ranks& ranks);

}  // namespace train_gpt
