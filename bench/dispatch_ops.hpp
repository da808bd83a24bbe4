#pragma once

#include <benchmark/benchmark.h>

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "te_fl/dtype.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/op_registry.hpp"
#include "te_fl/ops/gemm.h"
#include "te_fl/ops/optimizer.h"
#include "te_fl/tensor.hpp"

// Implementations for the dispatch benchmarks; they return at once.
namespace te_fl::bench_dispatch {

inline te_fl_status nothing(void*, const te_fl_context*, const void* args) {
  benchmark::DoNotOptimize(args);
  return TE_FL_OK;
}

inline te_fl_op_desc descriptor(const char* op, const char* id, uint32_t kind) {
  te_fl_op_desc d;
  d.op_name = op;
  d.impl_id = id;
  d.kind = kind;
  d.flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_STATIC_SUPPORT | TE_FL_OP_IN_PLACE_OK;
  d.device_types = uint64_t{1} << TE_FL_DEVICE_CPU;
  d.run = &nothing;
  return d;
}

inline te_fl_status one_kilobyte(void*, const te_fl_context*, const void*, size_t* bytes) {
  *bytes = 1024;
  return TE_FL_OK;
}
inline std::atomic<int64_t> g_plans_made{0};
inline te_fl_status make_plan(void*, const te_fl_context*, const void*, void** plan) {
  static char made;
  *plan = &made;
  ++g_plans_made;
  return TE_FL_OK;
}
inline void drop_plan(void*, void*) {}

// A registry with one implementation of an op of the catalogue. If `plans`, the implementation has
// plans and a workspace.
struct One {
  One(const char* name, bool plans) : manager(registry) {
    te_fl_op_desc d = descriptor(name, "vendor.x", TE_FL_KIND_VENDOR);
    d.dtypes = TE_FL_MASK_ANY_DTYPE;
    d.scalings = 0x3f;
    if (plans) {
      d.workspace = &one_kilobyte;
      d.prepare = &make_plan;
      d.destroy_plan = &drop_plan;
    }
    if (Status s = registry.register_op(d, "bench", "acme"); !s.ok()) die(s);
    op = registry.find(name).value();
  }
  OpRegistry registry;
  OpManager manager;
  OpId op;
};
inline One& gemm_impl(bool plans) {
  static One* const direct = new One("generic_gemm", false);
  static One* const planned = new One("generic_gemm", true);
  return plans ? *planned : *direct;
}

inline One& scale_impl() {
  static One* const one = new One("multi_tensor_scale", false);
  return *one;
}

enum Operands { kPlain, kScaled };
enum Needs { kNothing, kPlans };

inline Tensor operand(Operands operands, std::vector<int64_t> shape) {
  if (operands == kPlain) return Tensor::zeros(shape, DType::kBF16).value();
  QuantSpec spec;
  spec.dtype = DType::kF8E4M3;
  spec.scaling = Scaling::kTensor;
  spec.columnwise = true;
  return Tensor::empty_quantized(shape, spec).value();
}

struct Product {
  explicit Product(Operands operands, int64_t rows = 32)
      : a(operand(operands, {rows, 64})),
        b(operand(operands, {48, 64})),
        d(operand(kPlain, {rows, 48})),
        bias(operand(kPlain, {48})) {
    args.a = a;
    args.b = b;
    args.d = d;
    args.bias = bias;
    args.trans_b = 1;
  }
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;
  Tensor a, b, d, bias;
  te_fl_generic_gemm_args args;
};

// The arguments of a call that scales `count` tensors into `count` others.
struct Lists {
  explicit Lists(int count, int64_t columns = 8) : flag(Tensor::zeros({1}, DType::kI32).value()) {
    for (int i = 0; i < 2 * count; ++i) tensors.push_back(operand(kPlain, {4, columns}));
    for (const Tensor& t : tensors) pointers.push_back(t);
    args.inputs = pointers.data();
    args.inputs_count = count;
    args.outputs = pointers.data() + count;
    args.outputs_count = count;
    args.noop_flag = flag;
  }
  Lists(const Lists&) = delete;
  Lists& operator=(const Lists&) = delete;
  std::vector<Tensor> tensors;
  std::vector<const te_fl_tensor*> pointers;
  Tensor flag;
  te_fl_multi_tensor_scale_args args;
};

}  // namespace te_fl::bench_dispatch
