// Adapts process groups of torch.distributed to te_fl::nn.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "py/py.hpp"
#include "te_fl/device.hpp"
#include "te_fl/nn/fp8/amax_reduction.hpp"
#include "te_fl/nn/modules/expert_parallel.hpp"
#include "te_fl/nn/modules/sequence_ranks.hpp"

namespace te_fl::python {

// An amax reduction over ranks given by their numbers in the default group. Every reduction in an
// autocast of te_fl.pytorch has this class.
class GroupReduction : public nn::AmaxReduction {
 public:
  GroupReduction(Reduce reduce, std::vector<int64_t> ranks)
      : nn::AmaxReduction(std::move(reduce)), ranks_(std::move(ranks)) {}
  const std::vector<int64_t>& ranks() const noexcept { return ranks_; }

 private:
  std::vector<int64_t> ranks_;
};

// The stream's handle as a Python object, for making it the current stream; None if it is already
// the current stream of the framework of `like`.
Ref other_stream(PyObject* like, const Device& device, void* stream);

// The integers of a tuple; sorted.
std::vector<int64_t> to_ranks(PyObject* tuple);

// Adapts a te_fl.pytorch.distributed.sequence_ranks.SequenceRanks. The result keeps `object` alive.
std::shared_ptr<nn::SequenceRanks> make_sequence_ranks(PyObject* object);

// Adapts the same object as the ranks over which experts are divided.
std::shared_ptr<nn::ExpertRanks> make_expert_ranks(PyObject* object);

}  // namespace te_fl::python
