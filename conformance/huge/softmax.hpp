// Scaled softmax of huge tensors with all masks, and its gradients. The row lengths cover the
// storage that kernels use for a row: a few lanes, a block, a cluster of blocks, shared memory; and
// longer rows, which are read twice.
#pragma once

#include "conformance/huge/cases.hpp"
#include "te_fl/numeric.hpp"

namespace te_fl::huge::softmax_calls {

constexpr float kScale = 0.5f;
constexpr int64_t kHeads = 4;

struct Scores {
  int64_t batch, queries, keys;

  // Scores of `q` queries by `k` keys, with as many sequences as elements() needs.
  Scores(const Run& run, int64_t q, int64_t k)
      : batch((run.elements() + kHeads * q * k - 1) / (kHeads * q * k)), queries(q), keys(k) {}
  Shape shape() const { return {batch, kHeads, queries, keys}; }
  Shape flat() const { return {batch * kHeads, queries, keys}; }
};

enum class Mask { kNone, kCausal, kGiven };

// The visible keys of a row. kGiven: random bytes, repeated over the mask tensor.
struct Seen {
  Mask mask;
  Scores scores;
  bool one_head = false;  // a mask of [B, 1, Q, K]
  std::vector<uint8_t> bytes;

  Seen(Mask m, const Scores& s, bool broadcast) : mask(m), scores(s), one_head(broadcast) {
    if (mask != Mask::kGiven) return;
    const Pattern pattern(11);
    for (const float v : pattern.values()) bytes.push_back(v > 0.5f ? 1 : 0);
  }
  bool operator()(int64_t row, int64_t key) const {
    const int64_t q = row % scores.queries, head = row / scores.queries;
    if (mask == Mask::kCausal) return key <= q + scores.keys - scores.queries;
    if (mask == Mask::kNone) return true;
    const int64_t plane = one_head ? head / kHeads : head;
    const int64_t at = (plane * scores.queries + q) * scores.keys + key;
    return bytes[static_cast<size_t>(at % Pattern::kPeriod)] == 0;
  }
};

inline void forward(Run& run, const char* op, Mask mask, const Scores& scores,
                    bool broadcast = false) {
  const Pattern pattern(1);
  const Seen seen(mask, scores, broadcast);
  const bool flat = std::string(op) == "scaled_upper_triang_masked_softmax_forward";
  const Shape shape = flat ? scores.flat() : scores.shape();
  const Tensor x = run.input(shape, pattern), y = run.output(shape);
  Tensor bytes;
  te_fl_softmax_fwd4_args plain{};
  te_fl_softmax_masked_args masked{};
  te_fl_scaled_upper_triang_masked_softmax_forward_args triangle{};
  plain.input = masked.input = triangle.input = x;
  plain.output = masked.output = triangle.output = y;
  plain.scale = masked.scale = triangle.scale = kScale;
  if (mask == Mask::kGiven) {
    bytes =
        run.output({scores.batch, broadcast ? 1 : kHeads, scores.queries, scores.keys}, DType::kU8);
    run.repeat(bytes, seen.bytes);
    masked.mask = bytes;
    run.call(op, &masked);
  } else {
    run.call(op, flat ? static_cast<void*>(&triangle) : &plain);
  }
  const int64_t keys = scores.keys;
  int64_t row = -1;
  double sum = 0;
  run.expect(
      y, "output",
      [&](int64_t i) {
        if (i / keys != row) {
          row = i / keys, sum = 0;
          for (int64_t k = 0; k < keys; ++k) {
            if (seen(row, k)) sum += std::exp(kScale * double{pattern.at(row * keys + k)});
          }
        }
        return seen(row, i % keys) ? std::exp(kScale * double{pattern.at(i)}) / sum : 0.0;
      },
      0x1p-7, 1e-9);
}

// The gradient, with arbitrary numbers as probabilities. Causal: the probabilities of hidden keys
// are zero, as after a forward, so their gradient is 0 whether the op reads them or not.
inline void backward(Run& run, const char* op, bool causal, const Scores& scores) {
  const Pattern grad(1);
  const bool flat = std::string(op) == "scaled_upper_triang_masked_softmax_backward";
  const Shape shape = flat ? scores.flat() : scores.shape();
  const Tensor dy = run.input(shape, grad), dx = run.output(shape);
  Tensor y;
  const int64_t keys = scores.keys, queries = scores.queries;
  std::vector<float> plane;  // probabilities of one head, repeated for all
  const Pattern pattern(2);
  for (int64_t i = 0; causal && i < queries * keys; ++i) {
    plane.push_back(i % keys <= i / keys + keys - queries ? pattern.at(i) : 0);
  }
  if (causal) {
    y = run.output(shape);
    std::vector<uint8_t> bytes;
    for (const float v : plane) {
      const uint16_t half = numeric::float_to_bf16(v);
      bytes.push_back(static_cast<uint8_t>(half & 0xff)), bytes.push_back(half >> 8);
    }
    run.repeat(y, bytes);
  } else {
    y = run.input(shape, pattern);
  }
  te_fl_softmax_bwd4_args plain{};
  te_fl_scaled_upper_triang_masked_softmax_backward_args triangle{};
  plain.output_grad = triangle.output_grad = dy;
  plain.softmax_results = triangle.softmax_results = y;
  plain.input_grad = triangle.input_grad = dx, plain.scale = triangle.scale = kScale;
  run.call(op, flat ? static_cast<void*>(&triangle) : &plain);
  const auto result = [&](int64_t i) {
    return double{causal ? plane[static_cast<size_t>(i % (queries * keys))] : pattern.at(i)};
  };
  int64_t row = -1;
  double sum = 0, size = 0;
  run.expect_near(dx, "input_grad", [&](int64_t i) {
    if (i / keys != row) {
      row = i / keys, sum = 0, size = 0;
      for (int64_t k = row * keys; k < (row + 1) * keys; ++k) {
        sum += grad.at(k) * result(k), size += std::fabs(grad.at(k) * result(k));
      }
    }
    const double want = kScale * result(i) * (grad.at(i) - sum);
    return Near{want, 0x1p-8 * std::fabs(want) + 1e-5 * std::fabs(result(i)) * (size + 1)};
  });
}

}  // namespace te_fl::huge::softmax_calls
