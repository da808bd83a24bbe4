// Kernels of the router: a warp takes a token, and a lane every 32nd expert, in registers.
#pragma once

#include "common/element.cuh"
#include "common/integers.cuh"
#include "common/pack.cuh"
#include "common/value_errors.cuh"
#include "te_fl/ops/enums.h"

namespace te_fl::cuda {

constexpr int kMostExperts = 1024;  // 32 registers of a lane
constexpr int kMostGroups = 512;    // whose scores a block holds in shared memory
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

struct RouterShape {
  int64_t tokens;
  int experts, topk, groups, group_topk;
  int function;  // te_fl_score_function
  bool before;   // softmax before the choice
  float scaling;
};

// ---- numbers

__device__ inline float logistic_of(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ inline float sqrt_softplus_of(float x) {
  return sqrtf((x < 0.0f ? 0.0f : x) + log1pf(expf(-fabsf(x))));
}
__device__ inline float max_or_nan(float a, float b) { return b > a || isnan(b) ? b : a; }
__device__ inline float warp_max_or_nan(float v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    v = max_or_nan(v, __shfl_xor_sync(kAllLanes, v, step));
  }
  return v;
}

// Orders as the numbers do, a NaN above all; 0 is below all.
__device__ inline uint32_t order_of(float v) {
  if (isnan(v)) return 0xFFFFFFFFu;
  const uint32_t bits = __float_as_uint(v + 0.0f);  // -0 is 0
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

// The expert of the largest key, of equal ones the first; its key becomes 0. All lanes get it.
template <int kPer>
__device__ inline int take_largest(uint32_t (&keys)[kPer]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t best = 0;
  int at = 0;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    if (keys[j] > best) best = keys[j], at = j;
  }
  const uint32_t largest = __reduce_max_sync(kAllLanes, best);
  const unsigned mine = best == largest ? static_cast<unsigned>(at * 32 + lane) : 0xFFFFFFFFu;
  const int expert = static_cast<int>(__reduce_min_sync(kAllLanes, mine));
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    if (j * 32 + lane == expert) keys[j] = 0;
  }
  return expert;
}

// The value that the lane of an expert holds, for all lanes.
template <int kPer>
__device__ inline float value_of(const float (&values)[kPer], int expert) {
  float mine = 0.0f;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    if (j == expert / 32) mine = values[j];
  }
  return __shfl_sync(kAllLanes, mine, expert % 32);
}

// ---- choice

// Keeps the keys of the best groups alone. `scores` is the warp's, of a number for each group.
template <int kPer>
__device__ inline void keep_groups(const RouterShape& r, const float (&judged)[kPer],
                                   uint32_t (&keys)[kPer], uint32_t* scores) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int size = r.experts / r.groups;
  for (int g = 0; g < r.groups; ++g) {
    uint32_t inside[kPer];
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int e = j * 32 + lane;
      inside[j] = e >= g * size && e < (g + 1) * size ? keys[j] : 0;
    }
    float sum = 0.0f;
    for (int i = 0; i < r.topk / r.group_topk; ++i) {
      sum += value_of(judged, take_largest(inside));
    }
    if (lane == 0) scores[g] = order_of(sum);
  }
  __syncwarp();
  // A group stays if fewer than group_topk are better, or equal and before it.
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int mine = (j * 32 + lane) / size;
    if (mine >= r.groups) continue;
    int better = 0;
    for (int g = 0; g < r.groups; ++g) {
      better += scores[g] > scores[mine] || (scores[g] == scores[mine] && g < mine) ? 1 : 0;
    }
    if (better >= r.group_topk) keys[j] = 0;
  }
  __syncwarp();
}

// The outputs in which a kernel says what was chosen; each may be null.
struct ChoiceOutputs {
  uint8_t *map, *bits;
  void* indices;
  int index_bytes;  // 2, 4 or 8

  __device__ void put_index(int64_t at, int expert) const {
    if (index_bytes == 2) {
      static_cast<int16_t*>(indices)[at] = static_cast<int16_t>(expert);
    } else if (index_bytes == 4) {
      static_cast<int32_t*>(indices)[at] = expert;
    } else {
      static_cast<int64_t*>(indices)[at] = expert;
    }
  }
  // Bit j of `chosen`: the lane's expert j is. All lanes of the warp call it.
  template <int kPer>
  __device__ void put(int64_t token, int experts, uint32_t chosen) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, bytes = (experts + 7) / 8;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int e = j * 32 + lane;
      const bool is = (chosen >> j & 1u) != 0;
      if (map != nullptr && e < experts) map[token * experts + e] = is ? 1 : 0;
      if (bits == nullptr) continue;
      const unsigned word = __ballot_sync(kAllLanes, is);
      if (lane < 4 && j * 4 + lane < bytes) {
        bits[token * bytes + j * 4 + lane] = static_cast<uint8_t>(word >> lane * 8);
      }
    }
  }
};

// Rows of a float tensor; the dtype is looked at once for a row.
struct RowSource {
  const void* data;
  int dtype;
  explicit RowSource(const te_fl_tensor& t)
      : data(backend::data<const void>(t)), dtype(dtype_of(t)) {}
  // Experts past the last become `other`.
  template <int kPer>
  __device__ void load(int64_t row, int experts, float other, float (&v)[kPer]) const {
    if (dtype == TE_FL_F32) return load_as<float>(row, experts, other, v);
    if (dtype == TE_FL_BF16) return load_as<bf16>(row, experts, other, v);
    load_as<fp16>(row, experts, other, v);
  }

 private:
  template <class T, int kPer>
  __device__ void load_as(int64_t row, int experts, float other, float (&v)[kPer]) const {
    const T* const p = static_cast<const T*>(data) + row * experts;
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      v[j] = j * 32 + lane < experts ? to_f32(p[j * 32 + lane]) : other;
    }
  }
};

struct RowTarget {
  void* data;
  int dtype;
  explicit RowTarget(const te_fl_tensor& t) : data(backend::data<void>(t)), dtype(dtype_of(t)) {}
  template <int kPer>
  __device__ void store(int64_t row, int experts, const float (&v)[kPer]) const {
    if (dtype == TE_FL_F32) return store_as<float>(row, experts, v);
    if (dtype == TE_FL_BF16) return store_as<bf16>(row, experts, v);
    store_as<fp16>(row, experts, v);
  }

 private:
  template <class T, int kPer>
  __device__ void store_as(int64_t row, int experts, const float (&v)[kPer]) const {
    T* const p = static_cast<T*>(data) + row * experts;
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      if (j * 32 + lane < experts) p[j * 32 + lane] = from_f32<T>(v[j]);
    }
  }
};

// x becomes its softmax; experts past the last are -infinity.
template <int kPer>
__device__ inline void softmax_row(float (&x)[kPer]) {
  float top = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kPer; ++j) top = max_or_nan(top, x[j]);
  top = warp_max_or_nan(top);
#pragma unroll
  for (int j = 0; j < kPer; ++j) sum += x[j] = expf(x[j] - top);
  sum = warp_sum(sum);
#pragma unroll
  for (int j = 0; j < kPer; ++j) x[j] /= sum;
}

template <int kPer>
__device__ inline void scores_row(int function, float (&x)[kPer]) {
  if (function == TE_FL_SCORE_FUNCTION_SOFTMAX) return softmax_row(x);
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    x[j] = function == TE_FL_SCORE_FUNCTION_SIGMOID ? logistic_of(x[j]) : sqrt_softplus_of(x[j]);
  }
}

// The number of tokens' warps in the grid, and a warp's first token.
__device__ inline int64_t warps_of_grid() { return int64_t{gridDim.x} * kWarps; }
__device__ inline int64_t first_token() { return blockIdx.x * int64_t{kWarps} + threadIdx.x / 32; }

template <int kPer>
__global__ void __launch_bounds__(kThreads)
    topk_kernel(RowSource logits, const float* bias, RouterShape r, RowTarget probs,
                RowTarget saved, ChoiceOutputs choice) {
  extern __shared__ uint32_t group_scores[];  // [kWarps, groups]
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool softmax = r.function == TE_FL_SCORE_FUNCTION_SOFTMAX, after = softmax && !r.before;
  for (int64_t token = first_token(); token < r.tokens; token += warps_of_grid()) {
    float s[kPer], judged[kPer];
    uint32_t keys[kPer];
    logits.load(token, r.experts, -INFINITY, s);
    if (r.function == TE_FL_SCORE_FUNCTION_SQRTSOFTPLUS) {
      saved.store(token, r.experts, s);
    }
    if (!after) scores_row(r.function, s);
    if (!after && r.function != TE_FL_SCORE_FUNCTION_SQRTSOFTPLUS) {
      saved.store(token, r.experts, s);
    }
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int e = j * 32 + lane;
      judged[j] = bias != nullptr && e < r.experts ? s[j] + bias[e] : s[j];
      keys[j] = e < r.experts ? order_of(judged[j]) : 0;
    }
    if (r.groups > 0) {
      keep_groups(r, judged, keys, group_scores + threadIdx.x / 32 * r.groups);
    }
    uint32_t chosen = 0;
    float top = 0.0f;
    for (int i = 0; i < r.topk; ++i) {
      const int e = take_largest(keys);
      if (e % 32 == lane) chosen |= 1u << e / 32;
      if (after && i == 0) top = value_of(s, e);
      if (choice.indices != nullptr && lane == 0) choice.put_index(token * r.topk + i, e);
    }
    choice.put<kPer>(token, r.experts, chosen);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const bool is = (chosen >> j & 1u) != 0;
      if (after) s[j] = is ? expf(s[j] - top) : 0.0f;
      sum += is ? s[j] : 0.0f;
    }
    sum = warp_sum(sum);
    const float divisor = after ? sum : !softmax && r.topk > 1 ? sum + 1e-20f : 1.0f;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const bool is = (chosen >> j & 1u) != 0;
      const float p = is ? s[j] / divisor : 0.0f;
      judged[j] = is ? p : -INFINITY;
      s[j] = is ? r.scaling * p : 0.0f;
    }
    if (after) saved.store(token, r.experts, judged);
    probs.store(token, r.experts, s);
  }
}

template <int kPer>
__global__ void __launch_bounds__(kThreads)
    scores_kernel(RowSource logits, RouterShape r, RowTarget scores, RowTarget saved,
                  ChoiceOutputs choice) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t token = first_token(); token < r.tokens; token += warps_of_grid()) {
    float s[kPer];
    logits.load(token, r.experts, -INFINITY, s);
    const bool saves_logits = r.function == TE_FL_SCORE_FUNCTION_SQRTSOFTPLUS;
    if (saves_logits) saved.store(token, r.experts, s);
    scores_row(r.function, s);
    if (!saves_logits) saved.store(token, r.experts, s);
    if (r.function != TE_FL_SCORE_FUNCTION_SOFTMAX && r.topk > 1) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kPer; ++j) sum += j * 32 + lane < r.experts ? s[j] : 0.0f;
      sum = warp_sum(sum) + 1e-20f;
#pragma unroll
      for (int j = 0; j < kPer; ++j) s[j] /= sum;
    }
    scores.store(token, r.experts, s);
    if (choice.map == nullptr && choice.bits == nullptr) continue;
    uint32_t keys[kPer], chosen = 0;
#pragma unroll
    for (int j = 0; j < kPer; ++j) keys[j] = j * 32 + lane < r.experts ? order_of(s[j]) : 0;
    for (int i = 0; i < r.topk; ++i) {
      const int e = take_largest(keys);
      if (e % 32 == lane) chosen |= 1u << e / 32;
    }
    choice.put<kPer>(token, r.experts, chosen);
  }
}

// ---- gradients

// The inputs that say what was chosen: the first that is not null is read.
struct ChoiceInputs {
  const uint8_t *map, *bits;
  const void* indices;
  int index_bytes;
  ValueErrorSink errors;

  __device__ int64_t index(int64_t at) const {
    if (index_bytes == 2) return static_cast<const int16_t*>(indices)[at];
    if (index_bytes == 4) return static_cast<const int32_t*>(indices)[at];
    return static_cast<const int64_t*>(indices)[at];
  }
  // Bit j: the lane's expert j is chosen.
  template <int kPer>
  __device__ uint32_t get(int64_t token, int experts, int topk) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, bytes = (experts + 7) / 8;
    uint32_t chosen = 0;
    if (map == nullptr && bits == nullptr) {
      for (int i = 0; i < topk; ++i) {
        const int64_t at = token * topk + i, e = index(at);
        if (e < 0 || e >= experts) {
          if (lane == 0) note(errors, ValueRule::kChosenExpert, at, e, experts);
        } else if (e % 32 == lane) {
          chosen |= 1u << e / 32;
        }
      }
      return chosen;
    }
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int e = j * 32 + lane;
      if (e >= experts) continue;
      const bool is = map != nullptr ? map[token * experts + e] != 0
                                     : (bits[token * bytes + e / 8] >> e % 8 & 1) != 0;
      if (is) chosen |= 1u << j;
    }
    return chosen;
  }
};

static __global__ void __launch_bounds__(kThreads)
    check_indices_kernel(ChoiceInputs choice, int64_t size, int experts) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t e = choice.index(i);
    if (e < 0 || e >= experts) {
      note(choice.errors, ValueRule::kChosenExpert, i, e, experts);
    }
  }
}

// g, the gradient of scores, becomes that of logits. Sums go over the experts of `counts`, which
// are none past the last.
template <int kPer>
__device__ inline void gradient_row(int function, bool divides, uint32_t counts,
                                    const float (&saved)[kPer], float (&g)[kPer]) {
  float y[kPer], sum = 0.0f, dot = 0.0f;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    y[j] = function == TE_FL_SCORE_FUNCTION_SQRTSOFTPLUS ? sqrt_softplus_of(saved[j]) : saved[j];
    if ((counts >> j & 1u) == 0) continue;
    sum += y[j], dot = fmaf(g[j], y[j], dot);
  }
  dot = warp_sum(dot);
  if (function == TE_FL_SCORE_FUNCTION_SOFTMAX) {
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      g[j] = (counts >> j & 1u) != 0 ? y[j] * (g[j] - dot) : 0.0f;
    }
    return;
  }
  sum = warp_sum(sum) + 1e-20f;
  // In two steps: the square of a small sum is beyond what FP32 holds.
  const float less = dot / sum / sum;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    if (divides) g[j] = (counts >> j & 1u) != 0 ? g[j] / sum - less : 0.0f;
    if (function == TE_FL_SCORE_FUNCTION_SIGMOID) {
      g[j] *= y[j] * (1.0f - y[j]);
    } else {
      g[j] *= logistic_of(saved[j]) / (2.0f * y[j] + 1e-20f);
    }
  }
}

__device__ inline uint32_t all_experts(int experts, int per) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t all = 0;
  for (int j = 0; j < per; ++j) all |= j * 32 + lane < experts ? 1u << j : 0u;
  return all;
}

template <int kPer>
__global__ void __launch_bounds__(kThreads)
    topk_gradient_kernel(ChoiceInputs choice, RowSource saved, RowSource grad_probs, RouterShape r,
                         RowTarget grad_logits) {
  const uint32_t all = all_experts(r.experts, kPer);
  for (int64_t token = first_token(); token < r.tokens; token += warps_of_grid()) {
    const uint32_t chosen = choice.get<kPer>(token, r.experts, r.topk);
    float g[kPer], y[kPer];
    grad_probs.load(token, r.experts, 0.0f, g);
    saved.load(token, r.experts, 0.0f, y);
#pragma unroll
    for (int j = 0; j < kPer; ++j) g[j] = (chosen >> j & 1u) != 0 ? g[j] * r.scaling : 0.0f;
    gradient_row(r.function, r.topk > 1, r.before ? all : chosen, y, g);
    if (!r.before) {
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        if ((chosen >> j & 1u) == 0) g[j] = 0.0f;  // 0 times infinity is none
      }
    }
    grad_logits.store(token, r.experts, g);
  }
}

template <int kPer>
__global__ void __launch_bounds__(kThreads)
    scores_gradient_kernel(RowSource saved, RowSource grad_scores, RouterShape r,
                           RowTarget grad_logits) {
  const uint32_t all = all_experts(r.experts, kPer);
  for (int64_t token = first_token(); token < r.tokens; token += warps_of_grid()) {
    float g[kPer], y[kPer];
    grad_scores.load(token, r.experts, 0.0f, g);
    saved.load(token, r.experts, 0.0f, y);
    gradient_row(r.function, r.topk > 1, all, y, g);
    grad_logits.store(token, r.experts, g);
  }
}

}  // namespace te_fl::cuda
