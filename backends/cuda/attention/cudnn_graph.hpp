// A cuDNN operation graph put together node by node, and the execution plan made from it.
#pragma once

#include <array>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "attention/cudnn.hpp"

namespace te_fl::cuda {

using Extents = std::array<int64_t, 4>;

// Compact strides of extents.
constexpr Extents packed(const Extents& dims) noexcept {
  return {dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1};
}

// A plan that any handle of a device of its kind may run, any number of threads at once.
class CudnnPlan {
 public:
  size_t workspace() const noexcept { return workspace_; }
  // One tensor of the graph and where it is now.
  struct Binding {
    int64_t id;
    void* data;
  };
  // Enqueues; `workspace` has workspace() bytes.
  void run(CudnnState& state, int device, cudaStream_t stream, std::span<const Binding> tensors,
           void* workspace) const;

 private:
  friend class CudnnGraph;
  struct Constant {
    int64_t id;
    alignas(16) unsigned char bytes[4];
  };
  // The plan refers to the graph's descriptors, so they stay.
  std::deque<CudnnDescriptor> descriptors_;
  std::deque<Constant> constants_;
  std::string what_;  // the problem, for errors
  void* plan_ = nullptr;
  size_t workspace_ = 0;
};

// A tensor of a graph, which owns the descriptor.
struct CudnnTensor {
  void* descriptor = nullptr;
  Extents dims{}, strides{};
  explicit operator bool() const noexcept { return descriptor != nullptr; }
};

class CudnnGraph {
 public:
  using Tensor = CudnnTensor;
  // `what` describes the problem in errors.
  explicit CudnnGraph(std::string what) { result_.what_ = std::move(what); }

  // In memory, bound to an address at each run by its id. `offsets`: where each of dims[0]
  // sequences starts, in elements.
  Tensor tensor(int64_t id, int dtype, const Extents& dims, const Extents& strides,
                const Tensor& offsets = {});
  Tensor constant(float value);
  Tensor constant(int32_t value);
  // Not in memory: the result of a node below, compact unless strides say otherwise.
  Tensor between(int dtype, const Extents& dims) { return between(dtype, dims, packed(dims)); }
  Tensor between(int dtype, const Extents& dims, const Extents& strides,
                 const Tensor& offsets = {});

  // y = mode(x, b); with t: y = t ? x : b. The precision is that of the arithmetic. Each returns y.
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
  // c = a b; rows, cols, inner: the true extents of each sequence, [batch, 1, 1, 1] or absent.
  struct Lengths {
    Tensor rows = {}, cols = {}, inner = {};
  };
  Tensor matmul(const Tensor& a, const Tensor& b, const Tensor& c, const Lengths& lengths);
  // Over the dimensions in which y is 1 (or smaller).
  Tensor reduce(int mode, const Tensor& x, const Tensor& y);
  // Views the same memory under other dims and strides.
  Tensor view(const Tensor& x, const Tensor& y);

  // The first plan of the library's heuristics that it can make for such a device
  // (CudnnState::properties). Throws UNSUPPORTED if there is none. The graph is spent.
  CudnnPlan plan(void* device_properties) &&;

 private:
  void* make(int type);
  void set(void* descriptor, int name, int type, int64_t count, const void* values);
  void set_descriptor(void* descriptor, int name, void* value);
  void finalize(void* descriptor, const char* node);
  Tensor describe(int64_t id, int dtype, const Extents& dims, const Extents& strides,
                  const Tensor& offsets, bool is_virtual, bool by_value);
  Tensor constant_of(int dtype, const void* value);

  CudnnPlan result_;
  std::vector<void*> operations_;
  int64_t next_id_ = 1000;  // of tensors that the caller does not bind
};

}  // namespace te_fl::cuda
