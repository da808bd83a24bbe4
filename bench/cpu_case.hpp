// One benchmark case: an op's arguments over tensors of its own, and what its work is measured by.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "te_fl/plugin.h"

namespace te_fl::bench {

using Shape = std::vector<int64_t>;

class BenchTensor {
 public:
  BenchTensor(Shape shape, int dtype);
  BenchTensor(const BenchTensor&) = delete;
  BenchTensor& operator=(const BenchTensor&) = delete;
  operator const te_fl_tensor*() const { return &tensor_; }  // NOLINT: implicit on purpose

  int64_t numel() const;
  int64_t bytes() const;
  // Adds per-tensor FP8 scaling, or the block modes; with a column-wise copy if asked for.
  void quantised(te_fl_scaling scaling, uint32_t flags, bool columnwise);
  void set_strides(Shape strides) {
    strides_ = std::move(strides);
    tensor_.dl.strides = strides_.data();
  }
  template <class T>
  T* data() const {
    return static_cast<T*>(tensor_.dl.data);
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  using Memory = std::unique_ptr<void, Free>;
  static Memory allocate(int64_t bytes);

  Shape shape_, strides_;
  Memory memory_, columns_, scales_, column_scales_;
  float scale_ = 1, amax_ = 0;
  te_fl_quant quant_{};
  te_fl_tensor tensor_{};
};

class Case {
 public:
  // A new argument struct of the call; it lives as long as the case.
  template <class Args>
  Args& args() {
    auto made = std::make_shared<Args>();
    args_ = made;
    return *made;
  }
  const void* raw_args() const { return args_.get(); }

  // Tensors that the op reads, writes, or both; bytes() counts them so.
  BenchTensor& in(Shape shape, int dtype) { return make(std::move(shape), dtype, 1); }
  BenchTensor& out(Shape shape, int dtype) { return make(std::move(shape), dtype, 1); }
  BenchTensor& inout(Shape shape, int dtype) { return make(std::move(shape), dtype, 2); }
  // An FP8 tensor; with `columnwise` both copies count.
  BenchTensor& fp8(Shape shape, int dtype, te_fl_scaling scaling = TE_FL_SCALING_TENSOR,
                   bool columnwise = false, uint32_t flags = 0);
  const te_fl_tensor* const* list(std::vector<const te_fl_tensor*> tensors) {
    lists_.push_back(std::move(tensors));
    return lists_.back().data();
  }

  int64_t bytes = 0;   // moved by a call that reads and writes each element once
  int64_t memory = 0;  // of the tensors
  double flops = 0;    // of compute-bound ops
  // GEMM: the product that the library is given directly, op(A) m x k and op(B) k x n.
  struct Product {
    int64_t m = 0, n = 0, k = 0;
    bool trans_b = false;
    bool bf16 = false;
  } product;

 private:
  BenchTensor& make(Shape shape, int dtype, int times);

  std::shared_ptr<void> args_;
  std::deque<BenchTensor> tensors_;
  std::deque<std::vector<const te_fl_tensor*>> lists_;
};

// How an op is measured. build(case, rows) makes tensors whose size grows with `rows`.
struct CaseSpec {
  std::string op;
  std::string variant;  // dtype and what else tells two rows of one op apart
  std::function<void(Case&, int64_t rows)> build;
  bool memory_bound = true;  // else `rows` is fixed_rows
  int64_t fixed_rows = 0;
};
std::vector<CaseSpec> cpu_cases();

}  // namespace te_fl::bench
