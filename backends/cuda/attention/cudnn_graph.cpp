#include "attention/cudnn_graph.hpp"

#include <cstring>

#include "attention/cudnn_numbers.hpp"
#include "te_fl/backend.hpp"

namespace te_fl::cuda {

void CudnnPlan::run(CudnnState& state, int device, cudaStream_t stream,
                    std::span<const Binding> tensors, void* workspace) const {
  constexpr size_t kMost = 48;
  int64_t ids[kMost];
  void* pointers[kMost];
  const size_t count = tensors.size() + constants_.size();
  if (count > kMost) throw backend::Error(TE_FL_INTERNAL, "too many tensors in " + what_);
  size_t n = 0;
  for (const Binding& b : tensors) ids[n] = b.id, pointers[n++] = b.data;
  for (const Constant& c : constants_) {
    ids[n] = c.id;
    // The bytes are not modified; cuDNN's interface lacks the const.
    pointers[n++] = const_cast<unsigned char*>(c.bytes);
  }
  const CudnnDescriptor pack(cudnn_type::kVariantPack, what_);
  const auto set = [&](int name, int type, size_t length, const void* values) {
    check_cudnn(cudnn()->set(pack.get(), name, type, static_cast<int64_t>(length), values),
                "cudnnBackendSetAttribute", what_);
  };
  set(cudnn_attr::kPackPointers, cudnn_of::kPointer, count, pointers);
  set(cudnn_attr::kPackIds, cudnn_of::kInt64, count, ids);
  set(cudnn_attr::kPackWorkspace, cudnn_of::kPointer, 1, &workspace);
  check_cudnn(cudnn()->finalize(pack.get()), "cudnnBackendFinalize", what_);
  state.execute(device, stream, plan_, pack.get(), what_);
}

void* CudnnGraph::make(int type) {
  return result_.descriptors_.emplace_back(type, result_.what_).get();
}
void CudnnGraph::set(void* descriptor, int name, int type, int64_t count, const void* values) {
  check_cudnn(cudnn()->set(descriptor, name, type, count, values), "cudnnBackendSetAttribute",
              result_.what_);
}
void CudnnGraph::set_descriptor(void* descriptor, int name, void* value) {
  set(descriptor, name, cudnn_of::kDescriptor, 1, &value);
}
void CudnnGraph::finalize(void* descriptor, const char* node) {
  const int status = cudnn()->finalize(descriptor);
  if (status != 0)
    check_cudnn(status, "cudnnBackendFinalize", std::string(node) + " of " + result_.what_);
}

CudnnGraph::Tensor CudnnGraph::describe(int64_t id, int dtype, const Extents& dims,
                                        const Extents& strides, const Tensor& offsets,
                                        bool is_virtual, bool by_value) {
  Tensor t{make(cudnn_type::kTensor), dims, strides};
  const int64_t alignment = dims == Extents{1, 1, 1, 1} ? 4 : 16;
  set(t.descriptor, cudnn_attr::kTensorDataType, cudnn_of::kDataType, 1, &dtype);
  set(t.descriptor, cudnn_attr::kTensorDims, cudnn_of::kInt64, 4, dims.data());
  set(t.descriptor, cudnn_attr::kTensorStrides, cudnn_of::kInt64, 4, strides.data());
  set(t.descriptor, cudnn_attr::kTensorId, cudnn_of::kInt64, 1, &id);
  set(t.descriptor, cudnn_attr::kTensorAlignment, cudnn_of::kInt64, 1, &alignment);
  if (is_virtual) set(t.descriptor, cudnn_attr::kTensorVirtual, cudnn_of::kBool, 1, &is_virtual);
  if (by_value) set(t.descriptor, cudnn_attr::kTensorByValue, cudnn_of::kBool, 1, &by_value);
  if (offsets) {
    set_descriptor(t.descriptor, cudnn_attr::kTensorRaggedOffset, offsets.descriptor);
  }
  finalize(t.descriptor, "a tensor");
  return t;
}

CudnnGraph::Tensor CudnnGraph::tensor(int64_t id, int dtype, const Extents& dims,
                                      const Extents& strides, const Tensor& offsets) {
  return describe(id, dtype, dims, strides, offsets, false, false);
}
CudnnGraph::Tensor CudnnGraph::between(int dtype, const Extents& dims, const Extents& strides,
                                       const Tensor& offsets) {
  return describe(next_id_++, dtype, dims, strides, offsets, true, false);
}
CudnnGraph::Tensor CudnnGraph::make_constant(int dtype, const void* value) {
  const int64_t id = next_id_++;
  std::memcpy(result_.constants_.emplace_back(CudnnPlan::Constant{id, {}}).bytes, value, 4);
  return describe(id, dtype, {1, 1, 1, 1}, {1, 1, 1, 1}, {}, false, true);
}
CudnnGraph::Tensor CudnnGraph::constant(float value) {
  return make_constant(cudnn_data::kF32, &value);
}
CudnnGraph::Tensor CudnnGraph::constant(int32_t value) {
  return make_constant(cudnn_data::kI32, &value);
}

CudnnGraph::Tensor CudnnGraph::pointwise(const Pointwise& op, const Tensor& x, const Tensor& b,
                                         const Tensor& t, const Tensor& y) {
  void* kind = make(cudnn_type::kPointwise);
  set(kind, cudnn_attr::kPointwiseMode, cudnn_of::kPointwiseMode, 1, &op.mode);
  set(kind, cudnn_attr::kPointwisePrecision, cudnn_of::kDataType, 1, &op.precision);
  if (op.axis >= 0) {
    const int64_t axis = op.axis;
    set(kind, cudnn_attr::kPointwiseAxis, cudnn_of::kInt64, 1, &axis);
  }
  finalize(kind, "a pointwise mode");
  void* node = make(cudnn_type::kPointwiseOperation);
  set_descriptor(node, cudnn_attr::kPointwiseDescriptor, kind);
  set_descriptor(node, cudnn_attr::kPointwiseX, x.descriptor);
  if (b) set_descriptor(node, cudnn_attr::kPointwiseB, b.descriptor);
  if (t) set_descriptor(node, cudnn_attr::kPointwiseT, t.descriptor);
  set_descriptor(node, cudnn_attr::kPointwiseY, y.descriptor);
  finalize(node, "a pointwise node");
  operations_.push_back(node);
  return y;
}

CudnnGraph::Tensor CudnnGraph::matmul(const Tensor& a, const Tensor& b, const Tensor& c,
                                      const Lengths& lengths) {
  void* kind = make(cudnn_type::kMatmul);
  const int precision = cudnn_data::kF32;
  set(kind, cudnn_attr::kMatmulPrecision, cudnn_of::kDataType, 1, &precision);
  finalize(kind, "a product's mode");
  void* node = make(cudnn_type::kMatmulOperation);
  set_descriptor(node, cudnn_attr::kMatmulA, a.descriptor);
  set_descriptor(node, cudnn_attr::kMatmulB, b.descriptor);
  set_descriptor(node, cudnn_attr::kMatmulC, c.descriptor);
  set_descriptor(node, cudnn_attr::kMatmulDescriptor, kind);
  if (lengths.rows) set_descriptor(node, cudnn_attr::kMatmulRows, lengths.rows.descriptor);
  if (lengths.cols) set_descriptor(node, cudnn_attr::kMatmulCols, lengths.cols.descriptor);
  if (lengths.inner) set_descriptor(node, cudnn_attr::kMatmulInner, lengths.inner.descriptor);
  finalize(node, "a product");
  operations_.push_back(node);
  return c;
}

CudnnGraph::Tensor CudnnGraph::reduce(int mode, const Tensor& x, const Tensor& y) {
  void* kind = make(cudnn_type::kReduction);
  const int precision = cudnn_data::kF32;
  set(kind, cudnn_attr::kReductionMode, cudnn_of::kReductionMode, 1, &mode);
  set(kind, cudnn_attr::kReductionPrecision, cudnn_of::kDataType, 1, &precision);
  finalize(kind, "a reduction's mode");
  void* node = make(cudnn_type::kReductionOperation);
  set_descriptor(node, cudnn_attr::kReductionX, x.descriptor);
  set_descriptor(node, cudnn_attr::kReductionY, y.descriptor);
  set_descriptor(node, cudnn_attr::kReductionDescriptor, kind);
  finalize(node, "a reduction");
  operations_.push_back(node);
  return y;
}

CudnnGraph::Tensor CudnnGraph::view(const Tensor& x, const Tensor& y) {
  void* node = make(cudnn_type::kReshapeOperation);
  set_descriptor(node, cudnn_attr::kReshapeX, x.descriptor);
  set_descriptor(node, cudnn_attr::kReshapeY, y.descriptor);
  finalize(node, "a view");
  operations_.push_back(node);
  return y;
}

CudnnPlan CudnnGraph::plan(void* device_properties) && {
  const auto get = [&](const void* descriptor, int name, int type, int64_t room, void* values) {
    int64_t count = 0;
    check_cudnn(cudnn()->get(descriptor, name, type, room, &count, values),
                "cudnnBackendGetAttribute", result_.what_);
    return count;
  };
  void* graph = make(cudnn_type::kOperationGraph);
  set(graph, cudnn_attr::kGraphOperations, cudnn_of::kDescriptor,
      static_cast<int64_t>(operations_.size()), operations_.data());
  finalize(graph, "the graph");
  void* heuristics = make(cudnn_type::kEngineHeuristics);
  const int mode = kCudnnHeuristicA;
  set_descriptor(heuristics, cudnn_attr::kHeuristicGraph, graph);
  set_descriptor(heuristics, cudnn_attr::kHeuristicDevice, device_properties);
  set(heuristics, cudnn_attr::kHeuristicMode, cudnn_of::kHeuristicMode, 1, &mode);
  finalize(heuristics, "the heuristics");
  int64_t count = get(heuristics, cudnn_attr::kHeuristicResults, cudnn_of::kDescriptor, 0, nullptr);
  std::vector<void*> configs;
  for (int64_t i = 0; i < count; ++i) configs.push_back(make(cudnn_type::kEngineConfig));
  if (count > 0) {
    count = get(heuristics, cudnn_attr::kHeuristicResults, cudnn_of::kDescriptor, count,
                configs.data());
  }
  int refused = 3000;  // the value of CUDNN_STATUS_NOT_SUPPORTED
  std::string last = "cuDNN's heuristics name no engine for " + result_.what_;
  for (int64_t i = 0; i < count; ++i) {
    CudnnDescriptor plan(cudnn_type::kPlan, result_.what_);
    set_descriptor(plan.get(), cudnn_attr::kPlanEngineConfig, configs[static_cast<size_t>(i)]);
    set_descriptor(plan.get(), cudnn_attr::kPlanDevice, device_properties);
    const int status = cudnn()->finalize(plan.get());
    if (status != 0) {
      refused = status;
      last = cudnn_text(status, "cudnnBackendFinalize", "the plan of " + result_.what_);
      continue;
    }
    int64_t bytes = 0;
    get(plan.get(), cudnn_attr::kPlanWorkspace, cudnn_of::kInt64, 1, &bytes);
    result_.workspace_ = static_cast<size_t>(bytes);
    result_.plan_ = plan.get();
    result_.descriptors_.push_back(std::move(plan));
    return std::move(result_);
  }
  throw backend::Error(cudnn_refuses(refused) ? TE_FL_UNSUPPORTED : TE_FL_INTERNAL, last);
}

}  // namespace te_fl::cuda
