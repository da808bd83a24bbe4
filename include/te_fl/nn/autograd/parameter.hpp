#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "te_fl/export.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn {

namespace detail {
struct ParameterState;
}

// Position of a parameter within the full tensor of which it is a shard, e.g. the rows [begin,
// begin + extent) of a weight. Empty: the parameter is not sharded.
struct Shard {
  Shape whole;  // shape of the full, unsharded tensor
  Shape begin;  // index of the shard's first element in the full tensor
  // If not empty, the shard's rows (dimension 0) are these ranges of rows of the full tensor, one
  // after the other, instead of the rows from begin[0] on.
  struct Rows {
    int64_t begin = 0, count = 0;
  };
  std::vector<Rows> rows = {};
};

// A trainable tensor and its gradient. Modules may share a parameter by pointer (tied weights).
struct TE_FL_API Parameter {
  Parameter();
  ~Parameter();
  Parameter(const Parameter&) = delete;
  Parameter& operator=(const Parameter&) = delete;

  Tensor value;  // F32, BF16 or F16, compact; under quantized_model_init FP8 data only
  // Gradient, of value's shape and of grad_dtype. Undefined, which counts as zero, until a backward
  // first writes it or ensure_grad() makes it. A model that is not trained has no gradients.
  Tensor grad;
  DType grad_dtype = DType::kF32;  // set by Module::set_grad_dtype()
  // False: the parameter is frozen. A backward computes no gradient for it (the input's gradient is
  // unaffected), a forward saves no input for that gradient, and an optimizer does not update it.
  bool requires_grad = true;
  // The position of this shard in the full tensor; other ranks hold the other shards. Empty: not
  // sharded.
  Shard shard = {};
  // True: each rank of a tensor-parallel group computes a partial gradient, and the sum over the
  // ranks is the gradient; see sum_partial_gradients().
  bool partial_grad = false;
  // Sets requires_grad. false also drops the gradient and frees its memory. Call it between steps:
  // a backward computes a weight's gradient only if the weight required one both in the forward and
  // in the backward.
  void set_requires_grad(bool wanted);
  // Makes a zero gradient, if there is none and the parameter is not frozen. Call this before a
  // capture for every parameter whose gradient the captured backward would create: memory made in a
  // capture belongs to the graph, so that backward and this call return FAILED_PRECONDITION there
  // (GraphedStep's warm-up has made the gradients). Exception: the gradient of a borrowed parameter
  // in a capture that nn did not begin, where the owner takes the gradient that a launch writes.
  Status ensure_grad();
  // Makes the next backward overwrite grad instead of adding to it. Until then an optimizer refuses
  // the gradient as stale. (Module::zero_grad() fills gradients with zero instead.) In a capture
  // this applies to the backward of every launch. A backward in a captured graph adds unless the
  // same capture called clear_grad(), because the graph may be launched for any microbatch. Code
  // that writes a gradient without a backward passes it by give_grad(gradient, true).
  Status clear_grad();

  // Makes memory of another owner, such as a framework, the parameter's value. `lent` is a compact
  // tensor of value's shape on value's device, in F32, BF16 or F16. For a linear layer's weight it
  // may also be an E4M3 tensor (wrap_quantized()); training then needs its column-wise data.
  //
  // The owner allocates and frees the memory (Tensor::wrap, with or without an owner to keep alive)
  // and increments `owners_version` with every change of the contents. The same number as in the
  // last call means that the contents are the same, even at another address: copies made of them
  // (FP8, other dtypes) and forwards whose backward is still to come stay valid. An older number
  // means that the contents of that version are lent again, for the backward of a forward of that
  // version. A framework calls borrow() before each forward, and before a backward if the memory
  // has moved since.
  //
  // The memory must exist, unchanged, from this call until the work enqueued by later calls is
  // done. Between a forward and its backward te-fl holds no tensor of it. te-fl writes the memory
  // only in load_state() and in the step of an optimizer that has the parameter, and never writes
  // codes. A captured graph continues to use the memory that it was captured with. INVALID_ARGUMENT
  // names the mismatch; the value then does not change.
  Status borrow(Tensor lent, uint64_t owners_version);
  // Removes the gradient from the parameter and returns it. Undefined if there is none, or if it is
  // stale (see clear_grad()). Must not be called while a captured graph that writes the gradient
  // will still be launched.
  Tensor take_grad();
  // Makes `gradient` the tensor that later backward passes write, and its dtype the grad_dtype. It
  // is compact, in F32, BF16 or F16, of value's shape and on value's device; its owner keeps the
  // memory as in borrow(). `written` true: it holds a gradient, to which a backward adds; false:
  // the next backward overwrites it. INVALID_ARGUMENT if it does not fit; FAILED_PRECONDITION if
  // the parameter is frozen.
  Status give_grad(Tensor gradient, bool written);
  // Writes F32, BF16 or F16 values of value's shape, from any device, and increments `version`. An
  // FP8-only parameter quantises them. INVALID_ARGUMENT if they do not fit.
  Status write(const Tensor& values);
  // A copy of the value in new memory as F32, BF16 or F16, dequantised if necessary.
  Result<Tensor> read(DType dtype) const;
  // Host copy of the unquantised initial values of an FP8-only parameter, if
  // QuantizedModelInitOptions asked for it. Assign Tensor() to free it.
  Tensor initial_value;
  // Increases whenever an optimizer or load_state() writes the value. Quantised copies of an older
  // version are not reused. Other code that writes the value must increment it, too.
  uint64_t version = 0;

  // State that te-fl keeps for the parameter; for the library's own code.
  detail::ParameterState& internals() const noexcept { return *state_; }

 private:
  std::unique_ptr<detail::ParameterState> state_;
};

struct NamedTensor {
  std::string name;
  Tensor tensor;
};

struct NamedParameter {
  std::string name;  // dotted path, e.g. "self_attention.layernorm_qkv.weight"
  std::shared_ptr<Parameter> parameter;
  const Tensor& value() const { return parameter->value; }
  const Tensor& grad() const { return parameter->grad; }
};

}  // namespace te_fl::nn
