// Chooses the kernels for dropout, addition, embedding, cross-entropy and scaled activations: pure
// functions of metadata, so tests run without a GPU. The names are those of the kernel functions
// without "_kernel".
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "te_fl/backend.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/ops/dropout.h"
#include "te_fl/ops/tensor.h"

namespace te_fl::cuda {

struct PointwiseChoice {
  const char* kernel;
  const char* reason;    // a string literal
  bool aligned = false;  // every tensor is accessed in 16-byte vectors
  int packs = 0;         // 16-byte packs per thread of cross_entropy_gradient

  std::string text() const { return std::string(kernel) + ": " + reason; }
};

namespace pointwise_choice {

constexpr int64_t kPackElements = 8;  // equals kGroup of element.cuh
constexpr int kBlockThreads = 256;
constexpr int64_t kMostPositions = int64_t{1} << 31;  // number of positions that 32-bit indices can
                                                      // address
constexpr const char* kEmpty = "a tensor without elements";
constexpr const char* kAligned = "eight elements are read and written at once";
constexpr const char* kUnaligned = "element by element, as a tensor is not aligned to 16 bytes";

inline bool aligned16(const te_fl_tensor& t) noexcept {
  return reinterpret_cast<uintptr_t>(backend::data<const void>(t)) % 16 == 0;
}
inline bool is_empty(const te_fl_tensor& t) noexcept { return backend::numel(t) == 0; }
inline int dtype_in(const te_fl_tensor& t) noexcept { return dtype_index(t.dl.dtype); }
inline PointwiseChoice aligned_choice(const char* kernel, bool aligned) noexcept {
  return {kernel, aligned ? kAligned : kUnaligned, aligned};
}

}  // namespace pointwise_choice

inline PointwiseChoice choose_dropout(const te_fl_tensor& in, const te_fl_tensor& out) noexcept {
  using namespace pointwise_choice;
  if (is_empty(in)) return {"none", kEmpty};
  return aligned_choice("dropout", aligned16(in) && aligned16(out));
}
inline PointwiseChoice choose_pointwise(const te_fl_dropout_fwd_args& a) noexcept {
  return choose_dropout(*a.input, *a.output);
}
inline PointwiseChoice choose_pointwise(const te_fl_dropout_bwd_args& a) noexcept {
  return choose_dropout(*a.grad_output, *a.grad_input);
}
inline PointwiseChoice choose_pointwise(const te_fl_add_args& a) noexcept {
  using namespace pointwise_choice;
  if (is_empty(*a.output)) return {"none", kEmpty};
  const int dtype = dtype_in(*a.output);
  if (dtype_in(*a.a) != dtype || dtype_in(*a.b) != dtype) {
    return {"add_mixed", "tensors of several dtypes"};
  }
  return aligned_choice("add", aligned16(*a.a) && aligned16(*a.b) && aligned16(*a.output));
}

// "embedding" copies rows in 16-byte words. "store" converts dtypes, or copies rows of any
// alignment.
inline PointwiseChoice choose_pointwise(const te_fl_embedding_fwd_args& a) noexcept {
  using namespace pointwise_choice;
  const int64_t row_bytes = backend::as_matrix(*a.weight).cols * a.weight->dl.dtype.bits / 8;
  const int64_t words = backend::numel(*a.indices) * (row_bytes / 16);
  if (dtype_in(*a.weight) != dtype_in(*a.output)) {
    return {"store", "the rows are converted to another dtype"};
  }
  if (row_bytes % 16 != 0 || !aligned16(*a.weight) || !aligned16(*a.output)) {
    return {"store", "rows that are not whole pieces of 16 bytes"};
  }
  if (words == 0) return {"store", kEmpty};
  if (words >= kMostPositions) return {"store", "2^31 pieces of 16 bytes or more"};
  return {"embedding", "rows are copied 16 bytes at a time", true};
}
// True if the backward links positions into a list per table row. Otherwise all positions are
// scanned for each table row.
inline bool has_lists(const te_fl_embedding_bwd_args& a) noexcept {
  return backend::numel(*a.indices) < pointwise_choice::kMostPositions;
}
inline PointwiseChoice choose_pointwise(const te_fl_embedding_bwd_args& a) noexcept {
  using namespace pointwise_choice;
  if (is_empty(*a.grad_weight)) return {"none", kEmpty};
  if (has_lists(a)) return {"embedding_gradient by lists", "each row's positions are linked first"};
  return {"embedding_gradient", "2^31 positions or more, which lists do not count"};
}

inline PointwiseChoice choose_pointwise(const te_fl_cross_entropy_fwd_args& a) noexcept {
  using namespace pointwise_choice;
  if (backend::as_matrix(*a.logits).rows == 0) return {"none", kEmpty};
  return {"cross_entropy", "a block reads a row once"};
}
inline PointwiseChoice choose_pointwise(const te_fl_cross_entropy_bwd_args& a) noexcept {
  using namespace pointwise_choice;
  const backend::Matrix m = backend::as_matrix(*a.logits);
  if (m.rows == 0 || m.cols == 0) return {"none", kEmpty};
  const bool even = m.cols % kPackElements == 0 && aligned16(*a.logits);
  const int64_t runs =
      even ? m.cols / kPackElements : (m.cols + 2 * kPackElements - 2) / kPackElements;
  const int64_t packs = runs * (a.logits->dl.dtype.bits / 8) / 2;
  if (packs <= pointwise_choice::kBlockThreads)
    return {"cross_entropy_gradient of 1 pack", "a block holds a row", false, 1};
  return {"cross_entropy_gradient of 4 packs", "several blocks may share a row", false, 4};
}

// Chooses the kernel of a scaled activation. `rows`: the call's matrices. `half`: number of columns
// of the result. `turns`: in an input row, blocks of `turns` columns of a and of b alternate; 0:
// all columns of a, then all of b.
inline PointwiseChoice choose_scaled(bool forward, std::initializer_list<const te_fl_tensor*> rows,
                                     int64_t half, int64_t turns) noexcept {
  using namespace pointwise_choice;
  const char* const plain = forward ? "scaled_forward" : "scaled_gradient";
  if (turns % kPackElements != 0) {
    return {plain, "one column per thread, since glu_interleave_size is not a multiple of 8"};
  }
  bool same = true, aligned = half % kPackElements == 0;
  for (const te_fl_tensor* t : rows) {
    same = same && dtype_in(*t) == dtype_in(**rows.begin());
    aligned = aligned && aligned16(*t);
  }
  if (!same) return {plain, "eight columns of a thread, of tensors of several dtypes"};
  if (!aligned) return {plain, "eight columns of a thread, of rows that are not whole packs"};
  return {forward ? "scaled_forward_packs" : "scaled_gradient_packs", "sixteen columns of a thread",
          true};
}

}  // namespace te_fl::cuda
