#include "sgemm.hpp"

#include <algorithm>
#include <bit>
#include <memory>
#include <stdexcept>

#include "gemm_partition.hpp"
#include "onednn.hpp"
#include "thread_pool.hpp"

namespace te_fl::cpu {
namespace {

struct Shape {
  bool trans_a, trans_b;
  int64_t m, n, k;
  int64_t lda, ldb, ldc;
};

void require(bool holds, const char* name, int64_t value, const char* rule, int64_t least) {
  if (holds) return;
  throw std::invalid_argument(std::string("gemm: ") + name + " is " + std::to_string(value) +
                              ", must be at least " + std::to_string(least) + rule);
}

void validate(const Shape& s) {
  require(s.m >= 0, "m", s.m, "", 0);
  require(s.n >= 0, "n", s.n, "", 0);
  require(s.k >= 0, "k", s.k, "", 0);
  const int64_t row_a = std::max<int64_t>(1, s.trans_a ? s.m : s.k);
  const int64_t row_b = std::max<int64_t>(1, s.trans_b ? s.k : s.n);
  const int64_t row_c = std::max<int64_t>(1, s.n);
  require(s.lda >= row_a, "lda", s.lda, ", the length of a stored row of A", row_a);
  require(s.ldb >= row_b, "ldb", s.ldb, ", the length of a stored row of B", row_b);
  require(s.ldc >= row_c, "ldc", s.ldc, ", the length of a row of C", row_c);
}

// Uninitialised memory for floats.
std::unique_ptr<float[]> scratch(int64_t count) {
  return std::make_unique_for_overwrite<float[]>(static_cast<size_t>(count));
}

void scale_rows(float* c, int64_t rows, int64_t columns, int64_t ldc, float beta) {
  for (int64_t i = 0; i < rows; ++i, c += ldc) {
    if (beta == 0.0f) {
      std::fill_n(c, columns, 0.0f);
    } else {
      for (int64_t j = 0; j < columns; ++j) c[j] *= beta;
    }
  }
}

// Computes C = beta C, which is the result of the GEMM if k or alpha is 0.
void scale(const Shape& s, float beta, float* c) {
  if (beta == 1.0f) return;
  const int64_t grain = std::max<int64_t>(1, (1 << 16) / s.n);
  ThreadPool::instance().parallel_for(s.m, grain, [&](int64_t begin, int64_t end) {
    scale_rows(c + begin * s.ldc, end - begin, s.n, s.ldc, beta);
  });
}

// Computes the GEMM of one block on the calling thread. Overloaded by the operands' dtype.
void block_product(const OneDnn& library, const Shape& s, float alpha, const float* a,
                   const float* b, float beta, float* c) {
  library.sgemm(s.trans_a, s.trans_b, s.m, s.n, s.k, alpha, a, s.lda, b, s.ldb, beta, c, s.ldc);
}

void block_product(const OneDnn& library, const Shape& s, float alpha, const uint16_t* a,
                   const uint16_t* b, float beta, float* c) {
  if (beta == 0.0f) {
    library.bf16(s.trans_a, s.trans_b, s.m, s.n, s.k, a, s.lda, b, s.ldb, c, s.ldc);
    if (alpha != 1.0f) scale_rows(c, s.m, s.n, s.ldc, alpha);
    return;
  }
  const std::unique_ptr<float[]> product = scratch(s.m * s.n);
  library.bf16(s.trans_a, s.trans_b, s.m, s.n, s.k, a, s.lda, b, s.ldb, product.get(), s.n);
  const float* p = product.get();
  for (int64_t i = 0; i < s.m; ++i, p += s.n, c += s.ldc) {
    for (int64_t j = 0; j < s.n; ++j) c[j] = alpha * p[j] + beta * c[j];
  }
}

template <typename T>
struct Product {
  Shape shape;
  float alpha, beta;
  const T* a;
  const T* b;
  float* c;
};

// Partial sums over k, kept separately so that they are added in a fixed order. Block 0 is summed
// in C itself.
struct Partials {
  Partials(int64_t m, int64_t n, int64_t k_blocks)
      : plane(m * n), memory(k_blocks > 1 ? scratch(plane * (k_blocks - 1)) : nullptr) {}
  int64_t plane;
  std::unique_ptr<float[]> memory;
};

template <typename T>
void compute_block(const OneDnn& library, const Product<T>& p, const GemmPartition& grid,
                   const Partials& partials, int64_t index) {
  const Shape& s = p.shape;
  const int64_t k_index = index % grid.k_blocks;
  const int64_t column_index = index / grid.k_blocks % grid.column_blocks;
  const int64_t row_index = index / grid.k_blocks / grid.column_blocks;
  const Range rows = divide(s.m, grid.row_blocks, 8, row_index);
  const Range columns = divide(s.n, grid.column_blocks, 16, column_index);
  const Range depth = divide(s.k, grid.k_blocks, 64, k_index);
  if (rows.size == 0 || columns.size == 0) return;
  Shape block = s;
  block.m = rows.size;
  block.n = columns.size;
  block.k = depth.size;
  const T* a =
      p.a + (s.trans_a ? depth.begin * s.lda + rows.begin : rows.begin * s.lda + depth.begin);
  const T* b =
      p.b + (s.trans_b ? columns.begin * s.ldb + depth.begin : depth.begin * s.ldb + columns.begin);
  float* c = p.c + rows.begin * s.ldc + columns.begin;
  float beta = p.beta;
  if (k_index > 0) {
    block.ldc = s.n;
    c = partials.memory.get() + (k_index - 1) * partials.plane + rows.begin * s.n + columns.begin;
    beta = 0.0f;
  }
  block_product(library, block, p.alpha, a, b, beta, c);
}

template <typename T>
void add_partials(const Product<T>& p, const GemmPartition& grid, const Partials& partials) {
  if (grid.k_blocks == 1) return;
  const Shape& s = p.shape;
  const int64_t grain = std::max<int64_t>(1, (1 << 15) / s.n);
  ThreadPool::instance().parallel_for(s.m, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* c = p.c + i * s.ldc;
      for (int64_t part = 0; part < grid.k_blocks - 1; ++part) {
        const float* partial = partials.memory.get() + part * partials.plane + i * s.n;
        for (int64_t j = 0; j < s.n; ++j) c[j] += partial[j];
      }
    }
  });
}

template <typename T>
void multiply(const OneDnn& library, const Product<T>& p) {
  ThreadPool& pool = ThreadPool::instance();
  const Shape& s = p.shape;
  const int threads = ThreadPool::inside_task() ? 1 : pool.num_threads();
  const GemmPartition grid = partition_gemm(s.m, s.n, s.k, threads);
  const Partials partials(s.m, s.n, grid.k_blocks);
  pool.parallel_tasks(grid.blocks(),
                      [&](int64_t i) { compute_block(library, p, grid, partials, i); });
  add_partials(p, grid, partials);
}

// Converts a BF16 matrix to FP32, which is exact.
std::unique_ptr<float[]> widen(const uint16_t* x, int64_t rows, int64_t columns, int64_t ld) {
  std::unique_ptr<float[]> wide = scratch(rows * columns);
  const int64_t grain = std::max<int64_t>(1, (1 << 15) / columns);
  ThreadPool::instance().parallel_for(rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        wide[i * columns + j] = std::bit_cast<float>(uint32_t{x[i * ld + j]} << 16);
      }
    }
  });
  return wide;
}

}  // namespace

bool gemm_available(std::string* reason) { return OneDnn::available(reason); }

bool gemm_bf16_is_native() { return OneDnn::available(nullptr) && OneDnn::instance().has_bf16(); }

void sgemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
           int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
  const Shape shape{trans_a, trans_b, m, n, k, lda, ldb, ldc};
  validate(shape);
  if (m == 0 || n == 0) return;
  if (k == 0 || alpha == 0.0f) return scale(shape, beta, c);
  multiply<float>(OneDnn::instance(), {shape, alpha, beta, a, b, c});
}

void bf16gemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
              const uint16_t* a, int64_t lda, const uint16_t* b, int64_t ldb, float beta, float* c,
              int64_t ldc) {
  Shape shape{trans_a, trans_b, m, n, k, lda, ldb, ldc};
  validate(shape);
  if (m == 0 || n == 0) return;
  if (k == 0 || alpha == 0.0f) return scale(shape, beta, c);
  const OneDnn& library = OneDnn::instance();
  if (library.has_bf16()) {
    multiply<uint16_t>(library, {shape, alpha, beta, a, b, c});
    return;
  }
  const auto wide_a = trans_a ? widen(a, k, m, lda) : widen(a, m, k, lda);
  const auto wide_b = trans_b ? widen(b, n, k, ldb) : widen(b, k, n, ldb);
  shape.lda = trans_a ? m : k;
  shape.ldb = trans_b ? k : n;
  multiply<float>(library, {shape, alpha, beta, wide_a.get(), wide_b.get(), c});
}

void sgemm_batched(int64_t batch, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k,
                   float alpha, int64_t lda, int64_t ldb, float beta, int64_t ldc,
                   FunctionRef<SgemmOperands(int64_t)> operands) {
  const Shape shape{trans_a, trans_b, m, n, k, lda, ldb, ldc};
  validate(shape);
  require(batch >= 0, "batch", batch, "", 0);
  if (m == 0 || n == 0 || batch == 0) return;
  const bool product = k != 0 && alpha != 0.0f;
  const OneDnn* library = product ? &OneDnn::instance() : nullptr;
  ThreadPool& pool = ThreadPool::instance();
  const auto compute = [&](int64_t i) {
    const SgemmOperands x = operands(i);
    if (!product) return scale(shape, beta, x.c);
    multiply<float>(*library, {shape, alpha, beta, x.a, x.b, x.c});
  };
  // If there are fewer GEMMs than threads, each GEMM in turn is divided among the threads.
  // Otherwise each thread computes undivided GEMMs, in a few groups per thread for load balance.
  if (batch < pool.num_threads() && !ThreadPool::inside_task()) {
    for (int64_t i = 0; i < batch; ++i) compute(i);
    return;
  }
  const double work = 2.0 * double(m) * double(n) * double(std::max<int64_t>(k, 1));
  const auto per_group = static_cast<int64_t>(std::clamp(1e6 / work, 1.0, double(batch)));
  const int64_t groups =
      std::min((batch + per_group - 1) / per_group, int64_t{8} * pool.num_threads());
  pool.parallel_tasks(groups, [&](int64_t group) {
    const Range range = divide(batch, groups, 1, group);
    for (int64_t i = range.begin; i < range.begin + range.size; ++i) compute(i);
  });
}

}  // namespace te_fl::cpu
