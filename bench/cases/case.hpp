// The benchmark cases: calls of any size and the measures of their work (bytes, operations).
// bench_cpu and `te-fl bench` share this table for every backend. The table's entries are in
// conformance/cases, one file per family of ops, next to the cases of the conformance tests and of
// the tests with huge tensors.
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
  te_fl_tensor& c() { return tensor_; }

  // One allocation, and the struct member that points to it.
  struct Part {
    void** pointer;
    int64_t bytes;
  };
  std::vector<Part> parts();
  // Frees the memory that the constructor and quantised() allocated. For a caller that sets the
  // tensor's pointers to other memory.
  void drop_memory();

  int64_t numel() const;
  int64_t bytes() const;
  // Adds per-tensor FP8 scaling or block scaling; with column-wise data too if `columnwise`.
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
  int64_t scale_bytes_ = 0;
  Memory memory_, columns_, scales_, column_scales_;
  float scale_ = 1, amax_ = 0;
  te_fl_quant quant_{};
  te_fl_tensor tensor_{};
};

class Case {
 public:
  explicit Case(Shape extents = {}) : extents_(std::move(extents)) {}
  // Returns extent number i, in the order of CaseSpec::axes.
  int64_t extent(size_t i) const { return extents_.at(i); }
  int64_t cols() const { return extent(1); }
  // Makes a new argument struct for the call; it lives as long as the case.
  template <class Args>
  Args& args() {
    auto made = std::make_shared<Args>();
    args_ = made;
    return *made;
  }
  const void* raw_args() const { return args_.get(); }

  // Make a tensor that the op reads, writes, or both; bytes() counts its bytes accordingly.
  BenchTensor& in(Shape shape, int dtype) { return make(std::move(shape), dtype, 1); }
  BenchTensor& out(Shape shape, int dtype) { return make(std::move(shape), dtype, 1); }
  BenchTensor& inout(Shape shape, int dtype) { return make(std::move(shape), dtype, 2); }
  // Makes an FP8 tensor; if `columnwise`, bytes() counts the row-wise and the column-wise data.
  BenchTensor& fp8(Shape shape, int dtype, te_fl_scaling scaling = TE_FL_SCALING_TENSOR,
                   bool columnwise = false, uint32_t flags = 0);
  const te_fl_tensor* const* list(std::vector<const te_fl_tensor*> tensors) {
    lists_.push_back(std::move(tensors));
    return lists_.back().data();
  }

  std::deque<BenchTensor>& tensors() { return tensors_; }

  int64_t bytes = 0;   // bytes moved by a call that reads and writes each element once
  int64_t memory = 0;  // bytes of all tensors
  double flops = 0;    // operations of compute-bound ops
  // The matrix product of a GEMM case, for a direct call of a GEMM library: op(A) m x k times op(B)
  // k x n.
  struct Product {
    int64_t m = 0, n = 0, k = 0;
    bool trans_b = false;
    bool bf16 = false;
  } product;

 private:
  BenchTensor& make(Shape shape, int dtype, int times);

  Shape extents_;
  std::shared_ptr<void> args_;
  std::deque<BenchTensor> tensors_;
  std::deque<std::vector<const te_fl_tensor*>> lists_;
};

// The shapes and tensors of one op's benchmark.
struct CaseSpec {
  std::string op;
  std::string variant;  // dtype and other attributes that distinguish rows of one op
  std::function<void(Case&, int64_t rows)> body;  // makes the tensors; rows is the first extent
  bool memory_bound = true;                       // if false, bench_cpu uses fixed_rows
  int64_t fixed_rows = 0;
  std::string axes = "rows, cols";  // names of the extents; empty: the extents are fixed
  Shape extents = {4096, 1024};     // default extents on the host
  Shape large = {32768, 4096};      // default extents on an accelerator

  // Builds the case with `shape` as its extents, or with the host's default extents except that the
  // first is `rows`.
  std::unique_ptr<Case> build(const Shape& shape) const {
    auto c = std::make_unique<Case>(shape);
    body(*c, shape.at(0));
    return c;
  }
  std::unique_ptr<Case> build(int64_t rows) const {
    Shape shape = extents;
    shape.at(0) = rows;
    return build(shape);
  }
};
using Cases = std::vector<CaseSpec>;

// Names the extents of the cases from index `first` on and sets their default extents for the host
// and for an accelerator.
inline void describe(Cases& cases, size_t first, const char* axes, const Shape& extents,
                     const Shape& large) {
  for (size_t i = first; i < cases.size(); ++i) {
    cases[i].axes = axes, cases[i].extents = extents, cases[i].large = large;
  }
}

// Adds an F32 case and a BF16 case, each made by build(case, rows, dtype).
template <class Build>
void both_dtypes(Cases& cases, const std::string& op, Build build) {
  for (int dtype : {TE_FL_F32, TE_FL_BF16}) {
    cases.push_back({op, dtype == TE_FL_F32 ? "f32" : "bf16",
                     [build, dtype](Case& c, int64_t rows) { build(c, rows, dtype); }});
  }
}

// Divides `rows` among `tensors` tensors; returns the rows of each, rounded up to a multiple of 16
// because weights have such sizes.
inline int64_t rows_each(int64_t rows, int tensors) {
  return (rows + 16 * tensors - 1) / (16 * tensors) * 16;
}

// The cases of all ops; every op of the catalogue has at least one.
const Cases& all_cases();

}  // namespace te_fl::bench
