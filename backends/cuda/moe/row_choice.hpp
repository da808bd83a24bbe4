// Divides rows among threads: pure functions of a call's metadata, so that they can be tested where
// there is no GPU. The kernels are those of rows.cuh and listed_rows.cuh.
#pragma once

#include <cstdint>

namespace te_fl::cuda {

constexpr int kAtOnce = 4;  // pieces of a thread, loaded before the first is stored

// Rows cut into parts. A part is kAtOnce pieces of each of 2^lanes_log2 lanes, so that these lanes
// look up once for all of them what the row's token says.
struct RowCut {
  int lanes_log2 = 0;
  int64_t parts = 1;  // of a row
};
// The fewest lanes that hold a row of `pieces` pieces, and no more than a warp's.
constexpr RowCut cut_of(int64_t pieces) noexcept {
  RowCut cut;
  while (cut.lanes_log2 < 5 && (int64_t{kAtOnce} << cut.lanes_log2) < pieces) ++cut.lanes_log2;
  const int64_t part = int64_t{kAtOnce} << cut.lanes_log2;
  cut.parts = (pieces + part - 1) / part;
  return cut;
}

// Rows are summed by warps that list a token's rows where a row has pieces for two warps, and where
// a token has many places, as those of a mask's map, of which few have a row.
constexpr int64_t kFewPlaces = 8, kPiecesOfWarps = 64;
constexpr bool lists_rows(int64_t each, int64_t pieces) noexcept {
  return each > kFewPlaces || pieces >= kPiecesOfWarps;
}

}  // namespace te_fl::cuda
