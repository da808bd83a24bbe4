// A cuDNN operation graph that is built node by node, and the execution plan made from it.
#pragma once

#include <array>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "attention/cudnn.hpp"

namespace te_fl::cuda {

using Extents = std::array<int64_t, 4>;

// The strides of a compact tensor.
constexpr Extents packed(const Extents& dims) noexcept {
  return {dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1};
}

// An execution plan. Several threads may run it at once, on any handle of a device with the
// properties that it was made for.
class CudnnPlan {
 public:
  size_t workspace() const noexcept { return workspace_; }
  // A tensor of the graph and its address in this run.
  struct Binding {
    int64_t id;
    void* data;
  };
  // Enqueues the plan. `workspace`: device memory of workspace() bytes.
  void run(CudnnState& state, int device, cudaStream_t stream, std::span<const Binding> tensors,
           void* workspace) const;

 private:
  friend class CudnnGraph;
  struct Constant {
    int64_t id;
    alignas(16) unsigned char bytes[4];
  };
  // cuDNN's plan refers to the graph's descriptors, so this object owns them.
  std::deque<CudnnDescriptor> descriptors_;
  std::deque<Constant> constants_;
  std::string what_;  // description of the problem, for errors
  void* plan_ = nullptr;
  size_t workspace_ = 0;
};

// A tensor of a graph; the graph owns the descriptor.
struct CudnnTensor {
  void* descriptor = nullptr;
  Extents dims{}, strides{};
  explicit operator bool() const noexcept { return descriptor != nullptr; }
};

class CudnnGraph {
 public:
  using Tensor = CudnnTensor;
  // `what` describes the problem in error messages.
  explicit CudnnGraph(std::string what) { result_.what_ = std::move(what); }

  // A tensor in memory, whose address each run binds by `id`. `offsets`: the start of each of the
  // dims[0] sequences, in elements.
  Tensor tensor(int64_t id, int dtype, const Extents& dims, const Extents& strides,
                const Tensor& offsets = {});
  Tensor constant(float value);
  Tensor constant(int32_t value);
  // An intermediate tensor, which is the result of a node. Compact unless the call gives strides.
  Tensor between(int dtype, const Extents& dims) { return between(dtype, dims, packed(dims)); }
  Tensor between(int dtype, const Extents& dims, const Extents& strides,
                 const Tensor& offsets = {});

  // Adds the node y = mode(x, b) or, with a condition t, y = t ? x : b. Returns y. `precision`:
  // dtype of the arithmetic.
  struct Pointwise {
    int mode;
    int precision = 0;
    int axis = -1;
  };
  Tensor pointwise(const Pointwise& op, const Tensor& x, const Tensor& b, const Tensor& t,
                   const Tensor& y);
  Tensor pointwise(const Pointwise& op, const Tensor& x, const Tensor& b, const Tensor& y) {
    return pointwise(op, x, b, {}, y);
  }
  Tensor pointwise(const Pointwise& op, const Tensor& x, const Tensor& y) {
    return pointwise(op, x, {}, {}, y);
  }
  // Adds the node c = a b. rows, cols, inner: optional tensors [batch, 1, 1, 1] with the actual
  // extents of each sequence.
  struct Lengths {
    Tensor rows = {}, cols = {}, inner = {};
  };
  Tensor matmul(const Tensor& a, const Tensor& b, const Tensor& c, const Lengths& lengths);
  // Reduces x over the dimensions in which y has a smaller extent.
  Tensor reduce(int mode, const Tensor& x, const Tensor& y);
  // Makes y a view of x's memory with other dims and strides.
  Tensor view(const Tensor& x, const Tensor& y);

  // Returns the first plan that cuDNN's heuristics propose and cuDNN can build for the device.
  // Throws UNSUPPORTED if there is none. Consumes the graph. `device_properties`:
  // CudnnState::properties().
  CudnnPlan plan(void* device_properties) &&;

 private:
  void* make(int type);
  void set(void* descriptor, int name, int type, int64_t count, const void* values);
  void set_descriptor(void* descriptor, int name, void* value);
  void finalize(void* descriptor, const char* node);
  Tensor describe(int64_t id, int dtype, const Extents& dims, const Extents& strides,
                  const Tensor& offsets, bool is_virtual, bool by_value);
  Tensor make_constant(int dtype, const void* value);

  CudnnPlan result_;
  std::vector<void*> operations_;
  int64_t next_id_ = 1000;  // for tensors that the caller does not bind
};

}  // namespace te_fl::cuda
