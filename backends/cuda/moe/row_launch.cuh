// Divides copies of rows into kernel launches. Rows are copied in words of up to 16 bytes.
#pragma once

#include <algorithm>

#include "common/pack.cuh"
#include "moe/row_choice.hpp"
#include "te_fl/backend/refusal.hpp"

namespace te_fl::cuda {

using backend::Refusal;

// One launch over rows of `words` words each (a word: 1 to 16 bytes, see word_bytes()). The words
// of all these rows are numbered consecutively, from the first word of row `first`. `size`: number
// of words in the launch, below 2^31.
struct RowPieces {
  FastDiv words;
  int64_t first = 0, size = 0;
};

// Parts of rows, numbered consecutively from row `first`. `size`: number of parts, below 2^31.
struct RowParts {
  FastDiv parts;
  int lanes_log2 = 0;
  int64_t pieces = 0, first = 0, size = 0;  // pieces: number of pieces per row
};

// Bytes of the widest word that divides the row size and both addresses.
inline int64_t word_bytes(int64_t row_bytes, const te_fl_tensor& a, const te_fl_tensor& b) {
  const auto at = reinterpret_cast<uintptr_t>(backend::data<const void>(a)) |
                  reinterpret_cast<uintptr_t>(backend::data<const void>(b)) |
                  static_cast<uintptr_t>(row_bytes);
  return at % 16 == 0 ? 16 : at % 8 == 0 ? 8 : at % 4 == 0 ? 4 : at % 2 == 0 ? 2 : 1;
}

// Calls f with a value of the word type of `bytes` bytes.
template <class F>
void with_word(int64_t bytes, F&& f) {
  switch (bytes) {
    case 16:
      return f(uint4{});
    case 8:
      return f(uint2{});
    case 4:
      return f(uint32_t{});
    case 2:
      return f(uint16_t{});
    default:
      return f(uint8_t{});
  }
}

inline int64_t row_bytes_of(const te_fl_tensor& t) { return t.dl.shape[1] * (t.dl.dtype.bits / 8); }

// Calls f(pieces) for each launch over `rows` rows of `words` words from row `first`.
template <class F>
void for_pieces(int64_t first, int64_t rows, int64_t words, F&& f) {
  if (rows <= 0 || words <= 0) return;
  const int64_t most = std::max<int64_t>(1, (kFastDivLimit - 1) / words);
  for (int64_t row = 0; row < rows; row += most) {
    f(RowPieces{FastDiv(words), first + row, std::min(most, rows - row) * words});
  }
}

// Calls f(parts) for each launch over `rows` rows of `pieces` pieces.
template <class F>
void for_parts(int64_t rows, int64_t pieces, F&& f) {
  if (rows <= 0 || pieces <= 0) return;
  const RowCut cut = choose_row_cut(pieces);
  const int64_t most = std::max<int64_t>(1, (kFastDivLimit - 1) / cut.parts);
  for (int64_t row = 0; row < rows; row += most) {
    f(RowParts{FastDiv(cut.parts), cut.lanes_log2, pieces, row,
               std::min(most, rows - row) * cut.parts});
  }
}

inline unsigned block_count(int64_t pieces, int64_t each) {
  return static_cast<unsigned>(ceil_div(pieces, each));
}

// The launches above do not support rows of 2^31 words or more.
inline constexpr const char* kWideRows = "rows have 2^31 elements or more";
template <class... Tensors>
Refusal refuse_wide(const Tensors*... tensors) {
  return ((tensors->dl.shape[1] >= kFastDivLimit) || ...) ? kWideRows : nullptr;
}

}  // namespace te_fl::cuda
