// Process groups of torch.distributed as te_fl::nn uses them.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "py/py.hpp"
#include "te_fl/device.hpp"
#include "te_fl/nn/fp8/amax_reduction.hpp"
#include "te_fl/nn/modules/sequence_ranks.hpp"

namespace te_fl::python {

// A reduction of amaxes over ranks that are known by their numbers in the default group. All that
// an autocast of te_fl.pytorch has are such.
class GroupReduction : public nn::AmaxReduction {
 public:
  GroupReduction(Reduce reduce, std::vector<int64_t> ranks)
      : nn::AmaxReduction(std::move(reduce)), ranks_(std::move(ranks)) {}
  const std::vector<int64_t>& ranks() const noexcept { return ranks_; }

 private:
  std::vector<int64_t> ranks_;
};

// The handle of a stream as Python takes it to make it the current one; None where it is already
// the current one of the framework that `like` is of.
Ref other_stream(PyObject* like, const Device& device, void* stream);

// The integers of a tuple; sorted.
std::vector<int64_t> ranks_of(PyObject* tuple);

// The ranks that `object`, a te_fl.pytorch.distributed.sequence_ranks.SequenceRanks, stands for.
// They keep it.
std::shared_ptr<nn::SequenceRanks> sequence_ranks_of(PyObject* object);

}  // namespace te_fl::python
