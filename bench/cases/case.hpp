// The cases of benchmarks: calls of any size, with what their work is measured by. One table for
// every backend: bench_cpu and `te-fl bench` run it. Its entries stand with those of conformance
// and of huge tensors, one file per family of ops: conformance/cases.
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

  // One piece of memory and the member that points to it.
  struct Part {
    void** pointer;
    int64_t bytes;
  };
  std::vector<Part> parts();
  // Frees the memory that the constructor and quantised() took, when the parts point elsewhere.
  void drop_memory();

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
  int64_t scale_bytes_ = 0;
  Memory memory_, columns_, scales_, column_scales_;
  float scale_ = 1, amax_ = 0;
  te_fl_quant quant_{};
  te_fl_tensor tensor_{};
};

class Case {
 public:
  explicit Case(Shape extents = {}) : extents_(std::move(extents)) {}
  // Extent number i, in the order of CaseSpec::axes.
  int64_t extent(size_t i) const { return extents_.at(i); }
  int64_t cols() const { return extent(1); }
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

  std::deque<BenchTensor>& tensors() { return tensors_; }

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

  Shape extents_;
  std::shared_ptr<void> args_;
  std::deque<BenchTensor> tensors_;
  std::deque<std::vector<const te_fl_tensor*>> lists_;
};

// The shapes and tensors with which an op is measured.
struct CaseSpec {
  std::string op;
  std::string variant;  // dtype and what else tells two rows of one op apart
  std::function<void(Case&, int64_t rows)> body;  // makes the tensors; rows is the first extent
  bool memory_bound = true;                       // else `rows` is fixed_rows in bench_cpu
  int64_t fixed_rows = 0;
  std::string axes = "rows, cols";  // of the extents; empty: there are none to choose
  Shape extents = {4096, 1024};     // on the host, unless asked for otherwise
  Shape large = {32768, 4096};      // on an accelerator

  // The case with the shape as its extents, or with the host's and `rows` in place of their first.
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

// Names the extents of the rows from `first` on, and says what they are unless asked for: on the
// host, and on an accelerator.
inline void describe(Cases& cases, size_t first, const char* axes, const Shape& extents,
                     const Shape& large) {
  for (size_t i = first; i < cases.size(); ++i) {
    cases[i].axes = axes, cases[i].extents = extents, cases[i].large = large;
  }
}

// A row of F32 and one of BF16: build(case, rows, dtype).
template <class Build>
void both_dtypes(Cases& cases, const std::string& op, Build build) {
  for (int dtype : {TE_FL_F32, TE_FL_BF16}) {
    cases.push_back({op, dtype == TE_FL_F32 ? "f32" : "bf16",
                     [build, dtype](Case& c, int64_t rows) { build(c, rows, dtype); }});
  }
}

// Rows of each of `tensors` tensors that have `rows` together: in sixteens, as weights have them.
inline int64_t rows_each(int64_t rows, int tensors) {
  return (rows + 16 * tensors - 1) / (16 * tensors) * 16;
}

void add_activation(Cases& cases);
void add_attention(Cases& cases);
void add_chunks(Cases& cases);
void add_permute_by_mask(Cases& cases);
void add_delayed_scaling(Cases& cases);
void add_dropout(Cases& cases);
void add_gemm(Cases& cases);
void add_grouped_gemm(Cases& cases);
void add_moe(Cases& cases);
void add_multi_tensor(Cases& cases);
void add_norm(Cases& cases);
void add_optimizer(Cases& cases);
void add_quantize(Cases& cases);
void add_rope(Cases& cases);
void add_router(Cases& cases);
void add_scaled_activation(Cases& cases);
void add_softmax(Cases& cases);
void add_tensor(Cases& cases);

// Every op of the catalogue has at least one.
const Cases& all_cases();

}  // namespace te_fl::bench
