// Divides rows among threads, for the kernels of rows.cuh and listed_rows.cuh. Pure functions of
// metadata, so tests run without a GPU.
#pragma once

#include <cstdint>

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
constexpr RowCut cut_of(int64_t pieces) noexcept {
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

}  // namespace te_fl::cuda
