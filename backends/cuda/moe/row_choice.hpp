// Chooses the kernels of rows.cuh, listed_rows.cuh and scatter_rows.cuh and divides rows among
// their threads. Pure functions of metadata, so tests run without a GPU.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "te_fl/backend.hpp"
#include "te_fl/ops/moe.h"

namespace te_fl::cuda {

constexpr int kAtOnce = 4;  // pieces that a thread loads before it stores the first

// The division of a row into pieces and parts. A piece is the word that a lane loads or stores with
// one instruction. A part has kAtOnce pieces for each of 2^lanes_log2 lanes. The row_id_map entry
// of a row is read once per part instead of once per piece.
struct RowCut {
  int lanes_log2 = 0;
  int64_t parts = 1;  // number of parts of a row
};
// Divides a row of `pieces` pieces. Uses the smallest number of lanes, at most a warp, for which
// one part holds the row.
constexpr RowCut choose_row_cut(int64_t pieces) noexcept {
  RowCut cut;
  while (cut.lanes_log2 < 5 && (int64_t{kAtOnce} << cut.lanes_log2) < pieces) ++cut.lanes_log2;
  const int64_t part = int64_t{kAtOnce} << cut.lanes_log2;
  cut.parts = (pieces + part - 1) / part;
  return cut;
}

constexpr int64_t kFewPlaces = 8, kPiecesOfWarps = 64;
// True if sum_listed_rows_kernel is used, in which warps first list a token's rows. That is so if a
// row has enough 16-byte pieces for two warps, or if a token has more than kFewPlaces entries in
// row_id_map (`each`), most of which usually name no row.
constexpr bool lists_rows(int64_t each, int64_t pieces) noexcept {
  return each > kFewPlaces || pieces >= kPiecesOfWarps;
}

// The kernel that sums the rows of each token, or computes the gradients of these rows.
struct RowChoice {
  enum Kernel { kSum, kSumListed, kScatter, kFewGradient, kGradient };
  Kernel kernel;
  const char* reason;  // a string literal
  bool whole = false;  // rows are accessed in packs of 16 bytes

  std::string text() const {
    constexpr const char* kNames[] = {"sum_rows", "sum_listed_rows", "scatter_rows",
                                      "few_rows_gradient", "unpermute_gradient"};
    return std::string(kNames[kernel]) + ": " + reason;
  }
};

// True if the rows of all tensors, which have one shape and dtype, consist of 16-byte packs.
inline bool has_whole_packs(std::initializer_list<const te_fl_tensor*> tensors) noexcept {
  uintptr_t bits = 0;
  for (const te_fl_tensor* t : tensors) {
    bits |= reinterpret_cast<uintptr_t>(backend::data<const void>(*t)) |
            static_cast<uintptr_t>(t->dl.shape[1] * (t->dl.dtype.bits / 8));
  }
  return bits % 16 == 0;
}

// `map`: row_id_map, [entries of a token, tokens].
inline RowChoice choose_row_sum(const te_fl_tensor& input, const te_fl_tensor& map,
                                const te_fl_tensor& output) noexcept {
  const bool whole = has_whole_packs({&input, &output});
  const int64_t pack = whole ? 16 / (output.dl.dtype.bits / 8) : 1;
  if (!lists_rows(map.dl.shape[0], (output.dl.shape[1] + pack - 1) / pack)) {
    return {RowChoice::kSum, "short rows, and up to 8 map entries of a token", whole};
  }
  const bool many = map.dl.shape[0] > kFewPlaces;
  return {RowChoice::kSumListed, many ? "more than 8 map entries of a token" : "long rows", whole};
}

inline RowChoice choose_row_gradient(const te_fl_moe_unpermute_bwd_args& a) noexcept {
  const bool whole = has_whole_packs({a.grad_output, a.fwd_input, a.grad_input});
  if (a.probs == nullptr && a.grad_probs == nullptr) {
    return {RowChoice::kScatter, "rows are copied, as there are no probabilities", whole};
  }
  // For tokens with few map entries, listing the rows takes 1.4 times as long.
  if (a.row_id_map->dl.shape[0] <= kFewPlaces) {
    return {RowChoice::kFewGradient, "up to 8 map entries of a token", whole};
  }
  return {RowChoice::kGradient, "more than 8 map entries of a token", whole};
}

}  // namespace te_fl::cuda
