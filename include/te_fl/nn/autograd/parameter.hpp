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

// Says where a parameter lies in the whole whose shard it is, e.g. the rows [begin, begin + extent)
// of a weight; empty: it is whole.
struct Shard {
  Shape whole;  // the extents of the whole
  Shape begin;  // the index in it of the shard's first element
  // If not empty: the shard's rows (extent 0) are these of the whole, one range after the other, in
  // place of those from begin[0] on.
  struct Rows {
    int64_t begin = 0, count = 0;
  };
  std::vector<Rows> rows = {};
};

// A trainable tensor and its gradient. Modules share parameters by pointer (tied weights).
struct TE_FL_API Parameter {
  Parameter();
  ~Parameter();
  Parameter(const Parameter&) = delete;
  Parameter& operator=(const Parameter&) = delete;

  Tensor value;  // F32, BF16 or F16, compact; FP8 codes alone under quantized_model_init
  // Same shape, of grad_dtype. Undefined, which counts as zero, until a backward first writes it or
  // ensure_grad(): a model that is not trained has none.
  Tensor grad;
  DType grad_dtype = DType::kF32;  // see Module::set_grad_dtype()
  // False: frozen. A backward computes no gradient for it (the gradient of the input stays the
  // same), a forward keeps no input for that, and an optimizer leaves it as it is.
  bool requires_grad = true;
  // The value's place in the whole of which other ranks hold the rest; empty: it is whole.
  Shard shard = {};
  // True: each rank of a tensor-parallel group has a part of the gradient, and their sum is the
  // gradient; see sum_partial_gradients().
  bool partial_grad = false;
  // Sets requires_grad; false also drops the gradient and its memory. Between steps: a backward
  // computes the gradient of a weight that required one in its forward and still does.
  void set_requires_grad(bool wanted);
  // Makes the gradient, zero, if there is none and the parameter is not frozen. A capture needs it
  // of every parameter that its backward is the first to write: the memory would be the graph's, so
  // the backward is FAILED_PRECONDITION, and so is this call (GraphedStep's warm-up has made it).
  // Not of a borrowed one in a capture that nn did not begin: its owner takes what a launch writes.
  Status ensure_grad();
  // The next backward overwrites grad, whatever it holds, instead of adding to it. In a capture:
  // that of every launch; a backward in a captured graph always adds unless the same capture
  // cleared, as the graph may be launched for any microbatch. Until then an optimizer refuses the
  // gradient as stale; Module::zero_grad() makes it zero instead. Who writes a gradient without a
  // backward gives it by give_grad(gradient, true).
  Status clear_grad();

  // Borrowing: `lent`, compact, F32, BF16 or F16, of value's shape and on its device, becomes the
  // value; of a linear map's weight also E4M3 codes (wrap_quantized()), for training with their
  // column-wise copy. Its owner allocates and frees the memory (a Tensor::wrap with or without an
  // owner to keep alive) and advances `owners_version` with every change of the contents: the same
  // number as in the last call says that they are the same, wherever they lie, and then copies made
  // of them (FP8, other dtypes) and forwards whose backward is to come stay valid. An older number
  // says that the contents of then are lent again, for a backward of a forward of then. A framework
  // calls this before each forward, and before a backward if the memory has moved since. The memory
  // must be there, and unwritten, from then until the work that the calls enqueued is done; between
  // a forward and its backward te-fl holds no tensor of it. te-fl writes it in load_state() and in
  // the step of an optimizer that was given the parameter, nowhere else, and codes nowhere. A
  // captured graph goes on with the memory that it was captured with. INVALID_ARGUMENT names what
  // does not fit, and then the value stays.
  Status borrow(Tensor lent, uint64_t owners_version);
  // Takes the gradient out: the parameter has none afterwards. Undefined if there is none or it is
  // stale. Not while a graph is to write it.
  Tensor take_grad();
  // Makes `gradient`, compact, F32, BF16 or F16, of value's shape and on its device, what backwards
  // write from now on, and its dtype grad_dtype; the memory is its owner's as in borrow().
  // `written`: it holds values, to which a backward adds; false: the next one overwrites it.
  // INVALID_ARGUMENT if it does not fit; FAILED_PRECONDITION if the parameter is frozen.
  Status give_grad(Tensor gradient, bool written);
  // Writes F32, BF16 or F16 values of value's shape, from any device, and counts the version up; an
  // FP8-only parameter quantises them. INVALID_ARGUMENT if they do not fit.
  Status write(const Tensor& values);
  // The value in new memory as F32, BF16 or F16, dequantised if need be.
  Result<Tensor> read(DType dtype) const;
  // The values that an FP8-only parameter's first codes were made from, on the host, if that was
  // asked for (QuantizedModelInitOptions); assign Tensor() to free it.
  Tensor initial_value;
  // Changes whenever an optimizer or load_state() writes value; quantised copies of an older
  // version are not reused. Who writes value otherwise counts it up too.
  uint64_t version = 0;

  // Gives te-fl's own code what it keeps of the parameter.
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
