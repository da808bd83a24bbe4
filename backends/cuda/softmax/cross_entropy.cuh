// Kernels of softmax cross-entropy. Rows of any length and alignment are read in 16-byte vectors,
// once in the forward and once in the backward.
#pragma once

#include "common/integers.cuh"
#include "common/value_errors.cuh"
#include "softmax/running_sum.cuh"

namespace te_fl::cuda {

// Each block processes one row, from `first_row` on.
template <class T>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_kernel(const T* logits, Integers targets, float* loss, float* lse,
                         int64_t classes, float smoothing, int64_t ignored, int64_t first_row,
                         ValueErrorSink errors) {
  constexpr int kSize = Pack<T>::kSize, kAtOnce = 4;
  __shared__ float parts[3][kThreads / 32];
  const int64_t row = first_row + blockIdx.x;
  const T* x = logits + row * classes;
  const int shift = misalignment(x);
  RunningSum total;
  float plain = 0.0f;
  const int64_t first = static_cast<int64_t>(threadIdx.x) * kSize - shift;
  for (int64_t at = first; at < classes; at += kAtOnce * kThreads * kSize) {
    Pack<T> raw[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t col = at + u * kThreads * kSize;
      if (col < classes) load_cut(raw[u], x, col, classes);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t col = at + u * kThreads * kSize;
      if (col >= classes) continue;
      float v[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) v[i] = raw[u][i];
      if (smoothing != 0.0f) {  // elements outside the row are 0
#pragma unroll
        for (int i = 0; i < kSize; ++i) plain += v[i];
      }
      if (col < 0 || col + kSize > classes) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          if (col + i < 0 || col + i >= classes) v[i] = -INFINITY;
        }
      }
      total.add(v);
    }
  }
  total.join<kThreads>(parts[0], parts[1]);
  plain = smoothing != 0.0f ? sum_lanes<kThreads>(plain, parts[2]) : 0.0f;
  if (threadIdx.x != 0) return;
  const bool empty = total.sum == 0.0f;  // all logits are -inf
  const float row_lse = empty              ? -INFINITY
                        : isinf(total.top) ? total.top
                                           : total.top + logf(total.sum);
  lse[row] = row_lse;
  const int64_t target = targets[row];
  float value = 0.0f;
  if (target != ignored) {
    if (target < 0 || target >= classes) {
      value = NAN;
      note(errors, ValueRule::kTarget, row, target, classes);
    } else {
      value = row_lse;
      if (smoothing != 1.0f) value -= (1.0f - smoothing) * to_f32(x[target]);
      if (smoothing != 0.0f) value -= smoothing * (plain / static_cast<float>(classes));
    }
  }
  loss[row] = value;
}

struct LossGradient {
  Integers targets;
  const float* grad;
  const float* lse;
  int64_t classes;
  float smoothing;
  int64_t ignored;
  ValueErrorSink errors;
};

// blockIdx.x: row, counted from `first_row`. blockIdx.y: part of the row, counted from
// `first_part`; a part has `each` packs, at most kPacks * kThreads.
template <class T, int kPacks>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_gradient_kernel(const T* logits, T* out, LossGradient g, int each,
                                  int64_t first_row, int64_t first_part) {
  constexpr int kSize = Pack<T>::kSize;
  const int64_t row = first_row + blockIdx.x, classes = g.classes;
  const int64_t part = first_part + blockIdx.y;
  const T* x = logits + row * classes;
  T* dx = out + row * classes;
  const int shift = misalignment(x);
  const bool aligned = misalignment(dx) == shift;
  const int64_t first = (part * each + threadIdx.x) * kSize - shift;
  const int64_t end_col = (part + 1) * each * kSize - shift;
  const int64_t end = end_col < classes ? end_col : classes;
  Pack<T> raw[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int64_t col = first + p * kThreads * kSize;
    if (col < end) load_cut(raw[p], x, col, classes);
  }
  const int64_t target = g.targets[row];
  const float grad = g.grad[row], lse = g.lse[row];
  const float less = g.smoothing / static_cast<float>(classes);
  const bool outside = target != g.ignored && (target < 0 || target >= classes);
  if (outside && part == 0 && threadIdx.x == 0) {
    note(g.errors, ValueRule::kTarget, row, target, classes);
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int64_t col = first + p * kThreads * kSize;
    if (col >= end) continue;
    float v[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) v[i] = fast_exp(raw[p][i] - lse) - less;
    if (target >= col && target < col + kSize) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) v[i] -= col + i == target ? 1.0f - g.smoothing : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) v[i] *= grad;
    if (target == g.ignored || outside) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) v[i] = outside ? NAN : 0.0f;
    }
    raw[p].set(v);
    store_cut(raw[p], dx, col, classes, aligned);
  }
}

}  // namespace te_fl::cuda
