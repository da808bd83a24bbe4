// Mixture-of-experts ops on huge tensors: permutation of tokens, sums of their rows, padding of
// groups, offsets.
#pragma once

#include "conformance/huge/cases.hpp"
#include "te_fl/ops/moe.h"

namespace te_fl::huge::moe_calls {

constexpr int64_t kTop = 2;

inline Tensor shaped(Run& run, const Tensor& t, const Shape& shape) {
  if (run.failed()) return t;
  return t.view(shape).value();
}

// Pairs of tokens and experts. Without num_experts the last five pairs have no row.
inline void permute(Run& run, int64_t cols, int64_t num_experts) {
  const Pattern pattern(1);
  const int64_t tokens = run.rows(cols * kTop, 16), pairs = tokens * kTop;
  const int64_t rows = num_experts != 0 ? pairs : pairs - 5;
  constexpr int64_t kExperts = 8;
  std::vector<int32_t> experts, order(static_cast<size_t>(pairs));
  for (int64_t i = 0; i < pairs; ++i) {
    experts.push_back(static_cast<int32_t>(i * 7919 / 3 % kExperts));
  }
  size_t next = 0;
  for (int32_t e = 0; e < kExperts; ++e) {
    for (int64_t i = 0; i < pairs; ++i) {
      if (experts[static_cast<size_t>(i)] == e) order[next++] = static_cast<int32_t>(i);
    }
  }
  const Tensor x = run.input({tokens, cols}, pattern);
  const Tensor indices = shaped(run, run.integers(experts), {tokens, kTop});
  const Tensor y = run.output({rows, cols}), map = run.output({kTop, tokens}, DType::kI32);
  if (run.failed()) return;
  te_fl_moe_permute_fwd_args args{};
  args.input = x, args.indices = indices, args.output = y, args.row_id_map = map;
  args.num_experts = static_cast<int32_t>(num_experts);
  run.call("moe_permute_fwd", &args);
  run.expect(
      y, "output",
      [&](int64_t i) {
        return pattern.at(order[static_cast<size_t>(i / cols)] / kTop * cols + i % cols);
      },
      0, 0);
}

// The row of each pair [s, t]: a permutation of all rows.
inline std::vector<int32_t> make_rows(int64_t pairs) {
  std::vector<int32_t> map;
  int64_t step = 7919;
  while (pairs % step == 0) ++step;
  for (int64_t i = 0; i < pairs; ++i) map.push_back(static_cast<int32_t>(i * step % pairs));
  return map;
}
inline int64_t tokens_for(const Run& run, int64_t cols) {
  int64_t tokens = run.rows(cols * kTop, 1);
  while (tokens * kTop % 7919 == 0) ++tokens;
  return tokens;
}

inline void sums(Run& run, int64_t cols, const std::string& op) {
  const Pattern pattern(1), weights(2);
  const int64_t tokens = tokens_for(run, cols), pairs = tokens * kTop;
  const std::vector<int32_t> map = make_rows(pairs);
  const Tensor x = run.input({pairs, cols}, pattern);
  const Tensor rows = shaped(run, run.integers(map), {kTop, tokens});
  const Tensor probs = run.input({tokens, kTop}, weights, DType::kF32);
  const Tensor y = run.output({tokens, cols});
  if (run.failed()) return;
  te_fl_moe_permute_bwd_args back{};
  back.grad_output = x, back.row_id_map = rows, back.probs = probs, back.grad_input = y;
  te_fl_moe_unpermute_fwd_args forward{};
  forward.input = x, forward.row_id_map = rows, forward.probs = probs, forward.output = y;
  run.call(op.c_str(), op == "moe_permute_bwd" ? static_cast<const void*>(&back) : &forward);
  run.expect(
      y, "sums",
      [&](int64_t i) {
        double sum = 0;
        for (int64_t s = 0; s < kTop; ++s) {
          const int64_t t = i / cols, row = map[static_cast<size_t>(s * tokens + t)];
          sum += double{weights.at(t * kTop + s)} * pattern.at(row * cols + i % cols);
        }
        return sum;
      },
      0x1p-8, 1e-5);
}

inline void gradient(Run& run, int64_t cols) {
  const Pattern grad(1), input(2), weights(3);
  const int64_t tokens = tokens_for(run, cols), pairs = tokens * kTop;
  const std::vector<int32_t> map = make_rows(pairs);
  std::vector<int32_t> pair_of(map.size());
  for (size_t i = 0; i < map.size(); ++i) {
    pair_of[static_cast<size_t>(map[i])] = static_cast<int32_t>(i);
  }
  const Tensor dy = run.input({tokens, cols}, grad), x = run.input({pairs, cols}, input);
  const Tensor rows = shaped(run, run.integers(map), {kTop, tokens});
  const Tensor probs = run.input({tokens, kTop}, weights, DType::kF32);
  const Tensor dx = run.output({pairs, cols}), dp = run.output({tokens, kTop}, DType::kF32);
  if (run.failed()) return;
  te_fl_moe_unpermute_bwd_args args{};
  args.grad_output = dy, args.fwd_input = x, args.row_id_map = rows, args.probs = probs;
  args.grad_input = dx, args.grad_probs = dp;
  run.call("moe_unpermute_bwd", &args);
  run.expect(
      dx, "grad_input",
      [&](int64_t i) {
        const int64_t pair = pair_of[static_cast<size_t>(i / cols)];
        const int64_t s = pair / tokens, t = pair % tokens;
        return double{weights.at(t * kTop + s)} * grad.at(t * cols + i % cols);
      },
      0x1p-8, 1e-6);
  const auto dot = [&](int64_t i) {
    const int64_t t = i / kTop, row = map[static_cast<size_t>(i % kTop * tokens + t)];
    double sum = 0, size = 0;
    for (int64_t c = 0; c < cols; ++c) {
      const double term = double{grad.at(t * cols + c)} * input.at(row * cols + c);
      sum += term, size += std::fabs(term);
    }
    return Near{sum, 1e-6 * size + 1e-6};
  };
  run.expect_near(dp, "grad_probs", dot, Run::kFew);
}

inline void pad(Run& run, int64_t cols, bool pads) {
  const Pattern pattern(1);
  const int64_t rows = run.rows(cols, 16), first = rows / 3;
  const std::vector<int64_t> plain = {first, rows - first}, padded = {first + 7, rows - first + 2};
  const Tensor x = run.input({pads ? rows : rows + 9, cols}, pattern);
  const Tensor y = run.output({pads ? rows + 9 : rows, cols});
  if (run.failed()) return;
  te_fl_fused_multi_row_padding_args there{};
  there.input = x, there.output = y;
  there.input_rows = plain.data(), there.padded_rows = padded.data();
  there.input_rows_count = there.padded_rows_count = 2;
  te_fl_fused_multi_row_unpadding_args back{};
  back.input = x, back.output = y;
  back.input_rows = padded.data(), back.unpadded_rows = plain.data();
  back.input_rows_count = back.unpadded_rows_count = 2;
  if (pads) {
    run.call("fused_multi_row_padding", &there);
  } else {
    run.call("fused_multi_row_unpadding", &back);
  }
  run.expect(
      y, "output",
      [&](int64_t i) -> double {
        const int64_t row = i / cols;
        if (!pads) return pattern.at(row < first ? i : i + 7 * cols);
        if (row < first) return pattern.at(i);
        return row < first + 7 || row >= rows + 7 ? 0.0 : double{pattern.at(i - 7 * cols)};
      },
      0, 0);
}

inline void offsets(Run& run) {
  const int64_t size = run.elements();
  const Tensor splits = run.output({size}, DType::kI32), out = run.output({size + 1}, DType::kI32);
  std::vector<uint8_t> one(4 * 1024, 0);
  for (size_t i = 0; i < one.size(); i += 4096) one[i] = 1;  // one split in 1024 is 1
  run.repeat(splits, one);
  if (run.failed()) return;
  te_fl_splits_to_offsets_args args{};
  args.splits = splits, args.offsets = out;
  run.call("splits_to_offsets", &args);
  run.expect(
      out, "offsets", [](int64_t i) { return static_cast<double>((i + 1023) / 1024); }, 0, 0);
}

}  // namespace te_fl::huge::moe_calls
