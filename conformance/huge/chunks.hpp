// Reordering of chunks of rows in huge tensors.
#pragma once

#include "conformance/huge/cases.hpp"
#include "te_fl/ops/moe.h"

namespace te_fl::huge::chunk_calls {

// Three chunks followed by further rows. The order moves the first chunk to the end.
struct Turned {
  int64_t rows, size[3];
  explicit Turned(int64_t n) : rows(n), size{n / 3, n / 5, n - n / 3 - n / 5 - 2} {}
  // The input row of an output row; -1 for the rows after the chunks.
  int64_t source(int64_t r) const {
    if (r < size[2]) return size[0] + size[1] + r;
    if (r < size[2] + size[1]) return size[0] + r - size[2];
    return r < rows - 2 ? r - size[2] - size[1] : -1;
  }
};

inline void sort(Run& run, int64_t cols) {
  const Pattern pattern(1), weights(2);
  const Turned turned(run.rows(cols, 1));
  const int64_t rows = turned.rows;
  const auto int32 = [](int64_t n) { return static_cast<int32_t>(n); };
  const Tensor x = run.input({rows, cols}, pattern), y = run.output({rows, cols});
  const Tensor sizes =
      run.integers({int32(turned.size[0]), int32(turned.size[1]), int32(turned.size[2])});
  const Tensor order = run.integers({2, 1, 0}), map = run.output({rows}, DType::kI32);
  const Tensor probs = run.input({rows}, weights, DType::kF32);
  const Tensor moved = run.output({rows}, DType::kF32);
  if (run.failed()) return;
  te_fl_moe_sort_chunks_fwd_args args{};
  args.input = x, args.split_sizes = sizes, args.sorted_index = order, args.probs = probs;
  args.output = y, args.permuted_probs = moved, args.row_id_map = map;
  run.call("moe_sort_chunks_fwd", &args);
  run.expect(
      y, "output",
      [&](int64_t i) -> double {
        const int64_t source = turned.source(i / cols);
        return source < 0 ? 0.0 : double{pattern.at(source * cols + i % cols)};
      },
      0, 0);
  run.expect(
      moved, "permuted_probs",
      [&](int64_t r) -> double {
        return turned.source(r) < 0 ? 0.0 : double{weights.at(turned.source(r))};
      },
      0, 0);
}

inline void gradient(Run& run, int64_t cols) {
  const Pattern pattern(1);
  const Turned turned(run.rows(cols, 1));
  const int64_t rows = turned.rows;
  std::vector<int32_t> map;
  for (int64_t r = 0; r < rows; ++r) map.push_back(static_cast<int32_t>(turned.source(r)));
  const Tensor dy = run.input({rows, cols}, pattern), dx = run.output({rows, cols});
  const Tensor rows_map = run.integers(map);
  if (run.failed()) return;
  te_fl_moe_sort_chunks_bwd_args args{};
  args.grad_output = dy, args.row_id_map = rows_map, args.grad_input = dx;
  run.call("moe_sort_chunks_bwd", &args);
  run.expect(
      dx, "grad_input",
      [&](int64_t i) -> double {
        const int64_t source = map[static_cast<size_t>(i / cols)];
        return source < 0 ? 0.0 : double{pattern.at(source * cols + i % cols)};
      },
      0, 0);
}

}  // namespace te_fl::huge::chunk_calls
