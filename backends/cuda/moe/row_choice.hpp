// Divides rows among threads, for the kernels of rows.cuh and listed_rows.cuh. Pure functions of
// metadata, so tests run without a GPU.
#pragma once

#include <cstdint>

namespace te_fl::cuda {

constexpr int kAtOnce = 4;  // pieces that a thread loads before it stores the first

// The division of a row into parts. A piece is what a lane loads or stores at once. A part has
// kAtOnce pieces for each of 2^lanes_log2 lanes, which work on it together, so that they read the
// row's entry of row_id_map once per part and not once per piece.
struct RowCut {
  int lanes_log2 = 0;
  int64_t parts = 1;  // number of parts of a row
};
// The smallest number of lanes, at most a warp, whose part holds a row of `pieces` pieces.
constexpr RowCut cut_of(int64_t pieces) noexcept {
  RowCut cut;
  while (cut.lanes_log2 < 5 && (int64_t{kAtOnce} << cut.lanes_log2) < pieces) ++cut.lanes_log2;
  const int64_t part = int64_t{kAtOnce} << cut.lanes_log2;
  cut.parts = (pieces + part - 1) / part;
  return cut;
}

// True if rows are summed by warps that first list a token's rows: if a row has pieces for two
// warps, or if a token has many map entries, few of which have a row, as with a map made from a
// mask.
constexpr int64_t kFewPlaces = 8, kPiecesOfWarps = 64;
constexpr bool lists_rows(int64_t each, int64_t pieces) noexcept {
  return each > kFewPlaces || pieces >= kPiecesOfWarps;
}

}  // namespace te_fl::cuda
