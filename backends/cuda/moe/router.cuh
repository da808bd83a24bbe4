// Kernels of the router. A group of lanes processes a token; each lane has a run of experts in
// registers.
#pragma once

#include "common/element.cuh"
#include "common/integers.cuh"
#include "common/pack.cuh"
#include "common/value_errors.cuh"
#include "te_fl/ops/enums.h"

namespace te_fl::cuda {

constexpr int kMostExperts = 1024;  // 32 registers in each lane of a warp
constexpr int kMostGroups = 512;    // their scores are in a block's shared memory
constexpr int kFewChoices = 2;      // up to this many experts are chosen one by one
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

struct RouterShape {
  int64_t tokens;
  int experts, topk, groups, group_topk;
  int function;  // value of te_fl_score_function
  bool before;   // softmax is applied before the choice
  float scaling;
};

// ---- elementary functions

__device__ inline float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ inline float sqrt_softplus(float x) {
  // For small x, exp(x / 2) is exact to FP32's precision, while exp(x) would underflow.
  if (x < -20.0f) return expf(0.5f * x);
  return sqrtf((x < 0.0f ? 0.0f : x) + log1pf(expf(-fabsf(x))));
}
// Returns the derivative of sqrt(softplus) at x, where y is the function's value: sigmoid(x) / (2 y
// + 1e-20). Where sigmoid(x) underflows in FP32, y * y is used in its place.
__device__ inline float sqrt_softplus_slope(float x, float y) {
  const float divisor = 2.0f * y + 1e-20f;
  return x < -80.0f ? y / divisor * y : logistic(x) / divisor;
}
__device__ inline float max_or_nan(float a, float b) { return b > a || isnan(b) ? b : a; }

// ---- functions of the kLanes consecutive lanes that share a token. All lanes of a warp must call
// these functions.

template <int kLanes>
__device__ inline int lane_index() {
  return static_cast<int>(threadIdx.x) % kLanes;
}
template <int kLanes, class T, class F>
__device__ inline T over_lanes(T v, F&& f) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) v = f(v, __shfl_xor_sync(kAllLanes, v, step));
  return v;
}
template <int kLanes>
__device__ inline float sum_of_lanes(float v) {
  return over_lanes<kLanes>(v, [](float a, float b) { return a + b; });
}
template <int kLanes>
__device__ inline float top_of_lanes(float v) {
  return over_lanes<kLanes>(v, [](float a, float b) { return max_or_nan(a, b); });
}
template <int kLanes>
__device__ inline uint32_t max_of_lanes(uint32_t v) {
  if constexpr (kLanes == 32) return __reduce_max_sync(kAllLanes, v);
  return over_lanes<kLanes>(v, [](uint32_t a, uint32_t b) { return max(a, b); });
}
// Returns the index of the first of the token's lanes for which `says` is true. At least one such
// lane must exist.
template <int kLanes>
__device__ inline int first_lane(bool says) {
  if constexpr (kLanes == 1) return 0;
  const unsigned all = __ballot_sync(kAllLanes, says);
  return __ffs(static_cast<int>(all >> (threadIdx.x % 32 / kLanes * kLanes))) - 1;
}

// Maps a float to a key with the same order: NaN is above all numbers, and 0 is below all keys. The
// addition of 0 turns -0 into +0 and every NaN into 0x7FFFFFFF.
__device__ inline uint32_t ordered_bits(float v) {
  const uint32_t bits = __float_as_uint(__fadd_rn(v, 0.0f));
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

// Returns the token's expert with the largest key, in all lanes, and sets its key to 0. Of equal
// keys, that of the expert with the lowest index is taken.
template <int kLanes, int kPer>
__device__ inline int take_largest(uint32_t (&keys)[kPer]) {
  uint32_t mine = 0;
#pragma unroll
  for (int j = 0; j < kPer; ++j) mine = max(mine, keys[j]);
  const uint32_t largest = max_of_lanes<kLanes>(mine);
  const int holder = first_lane<kLanes>(mine == largest);
  int at = 0;
#pragma unroll
  for (int j = kPer - 1; j >= 0; --j) {
    if (keys[j] == largest) at = j;
  }
  if constexpr (kLanes > 1) at = __shfl_sync(kAllLanes, at, holder, kLanes);
  const int there = lane_index<kLanes>() == holder ? at : -1;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    if (j == there) keys[j] = 0;
  }
  return holder * kPer + at;
}

// ---- finds all of a token's largest keys together: each lane sorts its keys, then lanes merge
// their lists

__device__ inline void sort_two(uint32_t& first, uint32_t& second) {
  const uint32_t larger = max(first, second);
  second = min(first, second), first = larger;
}
// Sorts in descending order with Batcher's network of 19 exchanges.
__device__ inline void sort_eight(uint32_t (&v)[8]) {
  constexpr int kPairs[][2] = {{0, 1}, {2, 3}, {4, 5}, {6, 7}, {0, 2}, {1, 3}, {4, 6},
                               {5, 7}, {1, 2}, {5, 6}, {0, 4}, {1, 5}, {2, 6}, {3, 7},
                               {2, 4}, {3, 5}, {1, 2}, {3, 4}, {5, 6}};
#pragma unroll
  for (const auto& pair : kPairs) sort_two(v[pair[0]], v[pair[1]]);
}
// Returns the n-th largest key of a token, 1 <= n <= 8.
template <int kLanes>
__device__ inline uint32_t nth_largest(const uint32_t (&keys)[8], int n) {
  uint32_t top[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) top[j] = keys[j];
  sort_eight(top);
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    uint32_t theirs[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) theirs[j] = __shfl_xor_sync(kAllLanes, top[j], step);
      // The maxima of both lists form a bitonic sequence, which three rounds of exchanges sort.
#pragma unroll
    for (int j = 0; j < 8; ++j) top[j] = max(top[j], theirs[7 - j]);
#pragma unroll
    for (int stride = 4; stride > 0; stride /= 2) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if ((j & stride) == 0) sort_two(top[j], top[j + stride]);
      }
    }
  }
  uint32_t nth = top[0];
#pragma unroll
  for (int j = 1; j < 8; ++j) nth = j < n ? top[j] : nth;
  return nth;
}
// Sets bit j of `chosen` if the lane's expert j is among the n best. Returns false in all lanes if
// equal keys make the choice ambiguous.
template <int kLanes, int kPer>
__device__ inline bool choose_at_once(const uint32_t (&keys)[kPer], uint32_t there, int experts,
                                      int n, uint32_t& chosen) {
  if constexpr (kPer == 8) {
    const uint32_t least = nth_largest<kLanes>(keys, n);
    uint32_t best = 0;
#pragma unroll
    for (int j = 0; j < kPer; ++j) best |= keys[j] >= least ? 1u << j : 0;
    best &= there;
    const int count = over_lanes<kLanes>(__popc(best), [](int a, int b) { return a + b; });
    if (__all_sync(kAllLanes, count == n || experts == 0)) return chosen = best, true;
  }
  return false;
}

// Broadcasts the value of an expert from its lane to all lanes of the token.
template <int kLanes, int kPer>
__device__ inline float score_at(const float (&values)[kPer], int expert) {
  float mine = 0.0f;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    if (j == expert % kPer) mine = values[j];
  }
  return kLanes == 1 ? mine : __shfl_sync(kAllLanes, mine, expert / kPer, kLanes);
}

// Returns a bit mask: bit j is set if the lane's j-th expert exists.
template <int kLanes, int kPer>
__device__ inline uint32_t experts_of_lane(int experts) {
  const int left = experts - lane_index<kLanes>() * kPer;
  return left >= kPer ? 0xFFFFFFFFu >> (32 - kPer) : left > 0 ? (1u << left) - 1 : 0;
}

// ---- choice

// Sets the keys of experts outside the best groups to 0. `scores`: shared memory for the token, one
// word per group.
template <int kLanes, int kPer>
__device__ inline void keep_groups(const RouterShape& r, const float (&judged)[kPer],
                                   uint32_t (&keys)[kPer], uint32_t* scores) {
  const int first = lane_index<kLanes>() * kPer, size = r.experts / r.groups;
  for (int g = 0; g < r.groups; ++g) {
    uint32_t inside[kPer];
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      inside[j] = (first + j) / size == g ? keys[j] : 0;
    }
    float sum = 0.0f;
    for (int i = 0; i < r.topk / r.group_topk; ++i) {
      sum += score_at<kLanes>(judged, take_largest<kLanes>(inside));
    }
    if (first == 0) scores[g] = ordered_bits(sum);
  }
  __syncwarp();
  // A group is kept if fewer than group_topk groups have a better score, or an equal score and a
  // lower index.
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int mine = (first + j) / size;
    if (mine >= r.groups) continue;
    int better = 0;
    for (int g = 0; g < r.groups; ++g) {
      better += scores[g] > scores[mine] || (scores[g] == scores[mine] && g < mine) ? 1 : 0;
    }
    if (better >= r.group_topk) keys[j] = 0;
  }
  __syncwarp();
}

// The outputs that report the chosen experts; each may be NULL.
struct ChoiceOutputs {
  uint8_t *map, *bits;
  void* indices;
  int index_bytes;  // size of an index: 2, 4 or 8

  __device__ void put_index(int64_t at, int expert) const {
    if (index_bytes == 2) {
      static_cast<int16_t*>(indices)[at] = static_cast<int16_t>(expert);
    } else if (index_bytes == 4) {
      static_cast<int32_t*>(indices)[at] = expert;
    } else {
      static_cast<int64_t*>(indices)[at] = expert;
    }
  }
  // Writes the choice of a token. Bit j of `chosen`: the lane's expert j is chosen.
  template <int kLanes, int kPer>
  __device__ void put(int64_t token, int experts, uint32_t chosen) const {
    const int bytes = (experts + 7) / 8;
#pragma unroll
    for (int j = 0; j < kPer; j += kGroup) {
      const int first = lane_index<kLanes>() * kPer + j, n = min(experts - first, kGroup);
      if (n <= 0) continue;
      const uint32_t eight = chosen >> j & 0xFFu;
      if (map != nullptr) {
        uint8_t* const to = map + token * experts + first;
        // Spreads the lower and the upper four bits to four bytes each.
        const uint2 words{(eight & 0xFu) * 0x00204081u & 0x01010101u,
                          (eight >> 4) * 0x00204081u & 0x01010101u};
        if (n == kGroup && reinterpret_cast<uintptr_t>(to) % sizeof words == 0) {
          *reinterpret_cast<uint2*>(to) = words;
        } else {
#pragma unroll
          for (int i = 0; i < kGroup; ++i) {
            if (i < n) to[i] = static_cast<uint8_t>(eight >> i & 1u);
          }
        }
      }
      if (bits != nullptr) bits[token * bytes + first / 8] = static_cast<uint8_t>(eight);
    }
  }
};

// The rows of a float tensor. Branches on the dtype once per row. Accesses nothing past the last
// expert.
struct RowSource {
  const void* data;
  int dtype;
  explicit RowSource(const te_fl_tensor& t)
      : data(backend::data<const void>(t)), dtype(dtype_of(t)) {}
  // Loads the elements of a row for the lane's experts; those past the last expert become `other`.
  template <int kLanes, int kPer>
  __device__ void load(int64_t row, int experts, float other, float (&v)[kPer]) const {
    if (dtype == TE_FL_F32) return load_as<float, kLanes>(row, experts, other, v);
    if (dtype == TE_FL_BF16) return load_as<bf16, kLanes>(row, experts, other, v);
    load_as<fp16, kLanes>(row, experts, other, v);
  }

 private:
  template <class T, int kLanes, int kPer>
  __device__ void load_as(int64_t row, int experts, float other, float (&v)[kPer]) const {
    const T* const p = static_cast<const T*>(data) + row * experts;
#pragma unroll
    for (int j = 0; j < kPer; j += kGroup) {
      const int first = lane_index<kLanes>() * kPer + j, n = min(experts - first, kGroup);
      load_group(p + first, n, v + j);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) v[j + i] = i < n ? v[j + i] : other;
    }
  }
};

struct RowTarget {
  void* data;
  int dtype;
  explicit RowTarget(const te_fl_tensor& t) : data(backend::data<void>(t)), dtype(dtype_of(t)) {}
  template <int kLanes, int kPer>
  __device__ void store(int64_t row, int experts, const float (&v)[kPer]) const {
    if (dtype == TE_FL_F32) return store_as<float, kLanes>(row, experts, v);
    if (dtype == TE_FL_BF16) return store_as<bf16, kLanes>(row, experts, v);
    store_as<fp16, kLanes>(row, experts, v);
  }

 private:
  template <class T, int kLanes, int kPer>
  __device__ void store_as(int64_t row, int experts, const float (&v)[kPer]) const {
    T* const p = static_cast<T*>(data) + row * experts;
#pragma unroll
    for (int j = 0; j < kPer; j += kGroup) {
      const int first = lane_index<kLanes>() * kPer + j;
      store_group(p + first, min(experts - first, kGroup), v + j);
    }
  }
};

// Replaces x by its softmax. Experts past the last must be -infinity.
template <int kLanes, int kPer>
__device__ inline void softmax_row(float (&x)[kPer]) {
  float top = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kPer; ++j) top = max_or_nan(top, x[j]);
  top = top_of_lanes<kLanes>(top);
#pragma unroll
  for (int j = 0; j < kPer; ++j) sum += x[j] = expf(x[j] - top);
  const float share = 1.0f / sum_of_lanes<kLanes>(sum);
#pragma unroll
  for (int j = 0; j < kPer; ++j) x[j] *= share;
}

template <int kLanes, int kPer>
__device__ inline void scores_row(int function, float (&x)[kPer]) {
  if (function == TE_FL_SCORE_FUNCTION_SOFTMAX) return softmax_row<kLanes>(x);
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    x[j] = function == TE_FL_SCORE_FUNCTION_SIGMOID ? logistic(x[j]) : sqrt_softplus(x[j]);
  }
}

// Calls f(token, experts) for each token that this group of lanes processes. All lanes of a warp
// make the same number of calls; in calls without a token, `experts` is 0.
template <int kLanes, class F>
__device__ inline void for_tokens_of_lanes(const RouterShape& r, F&& f) {
  const int64_t step = int64_t{gridDim.x} * (kThreads / kLanes);
  int64_t first = blockIdx.x * int64_t{kThreads / kLanes} + threadIdx.x / 32 * (32 / kLanes);
  for (; first < r.tokens; first += step) {
    const int64_t token = first + threadIdx.x % 32 / kLanes;
    f(token, token < r.tokens ? r.experts : 0);
  }
}

template <int kLanes, int kPer>
__global__ void __launch_bounds__(kThreads, kPer == 8 ? (kLanes == 1 ? 4 : 3) : 1)
    topk_kernel(RowSource logits, const float* bias, RouterShape r, RowTarget probs,
                RowTarget saved, ChoiceOutputs choice) {
  extern __shared__ uint32_t group_scores[];  // shape [tokens per block, groups]
  const int lane = lane_index<kLanes>();
  const bool softmax = r.function == TE_FL_SCORE_FUNCTION_SOFTMAX, after = softmax && !r.before;
  const bool saves_logits = r.function == TE_FL_SCORE_FUNCTION_SQRTSOFTPLUS;
  for_tokens_of_lanes<kLanes>(r, [&](int64_t token, int experts) {
    const uint32_t there = experts_of_lane<kLanes, kPer>(experts);
    float s[kPer], judged[kPer];
    uint32_t keys[kPer];
    logits.load<kLanes>(token, experts, -INFINITY, s);
    if (saves_logits) saved.store<kLanes>(token, experts, s);
    if (!after) scores_row<kLanes>(r.function, s);
    if (!after && !saves_logits) saved.store<kLanes>(token, experts, s);
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const bool is = (there >> j & 1u) != 0;
      judged[j] = bias != nullptr && is ? s[j] + bias[lane * kPer + j] : s[j];
      keys[j] = is ? ordered_bits(judged[j]) : 0;
    }
    if (r.groups > 0) {
      keep_groups<kLanes>(r, judged, keys, group_scores + threadIdx.x / kLanes * r.groups);
    }
    uint32_t chosen = 0;
    const bool at_once = r.topk > kFewChoices && r.topk <= 8 && choice.indices == nullptr &&
                         choose_at_once<kLanes>(keys, there, experts, r.topk, chosen);
    for (int i = 0; i < r.topk && !at_once; ++i) {
      const int e = take_largest<kLanes>(keys);
      if (e / kPer == lane) chosen |= 1u << e % kPer;
      if (choice.indices != nullptr && lane == 0 && experts > 0) {
        choice.put_index(token * r.topk + i, e);
      }
    }
    choice.put<kLanes, kPer>(token, experts, chosen);
    float top = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      if ((chosen >> j & 1u) != 0) top = max_or_nan(top, s[j]);
    }
    top = top_of_lanes<kLanes>(top);
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const bool is = (chosen >> j & 1u) != 0;
      if (after) s[j] = is ? expf(s[j] - top) : 0.0f;
      sum += is ? s[j] : 0.0f;
    }
    sum = sum_of_lanes<kLanes>(sum);
    const float share = after ? 1.0f / sum : !softmax && r.topk > 1 ? 1.0f / (sum + 1e-20f) : 1.0f;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const bool is = (chosen >> j & 1u) != 0;
      const float p = is ? s[j] * share : 0.0f;
      judged[j] = is ? p : -INFINITY;
      s[j] = is ? r.scaling * p : 0.0f;
    }
    if (after) saved.store<kLanes>(token, experts, judged);
    probs.store<kLanes>(token, experts, s);
  });
}

template <int kLanes, int kPer>
__global__ void __launch_bounds__(kThreads)
    scores_kernel(RowSource logits, RouterShape r, RowTarget scores, RowTarget saved,
                  ChoiceOutputs choice) {
  const int lane = lane_index<kLanes>();
  const bool saves_logits = r.function == TE_FL_SCORE_FUNCTION_SQRTSOFTPLUS;
  for_tokens_of_lanes<kLanes>(r, [&](int64_t token, int experts) {
    const uint32_t there = experts_of_lane<kLanes, kPer>(experts);
    float s[kPer];
    logits.load<kLanes>(token, experts, -INFINITY, s);
    if (saves_logits) saved.store<kLanes>(token, experts, s);
    scores_row<kLanes>(r.function, s);
    if (!saves_logits) saved.store<kLanes>(token, experts, s);
    if (r.function != TE_FL_SCORE_FUNCTION_SOFTMAX) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kPer; ++j) sum += (there >> j & 1u) != 0 ? s[j] : 0.0f;
      const float share = 1.0f / (sum_of_lanes<kLanes>(sum) + 1e-20f);
#pragma unroll
      for (int j = 0; j < kPer; ++j) s[j] *= share;
    }
    scores.store<kLanes>(token, experts, s);
    if (choice.map == nullptr && choice.bits == nullptr) return;
    uint32_t keys[kPer], chosen = 0;
#pragma unroll
    for (int j = 0; j < kPer; ++j) keys[j] = (there >> j & 1u) != 0 ? ordered_bits(s[j]) : 0;
    const bool at_once = r.topk > kFewChoices && r.topk <= 8 &&
                         choose_at_once<kLanes>(keys, there, experts, r.topk, chosen);
    for (int i = 0; i < r.topk && !at_once; ++i) {
      const int e = take_largest<kLanes>(keys);
      if (e / kPer == lane) chosen |= 1u << e % kPer;
    }
    choice.put<kLanes, kPer>(token, experts, chosen);
  });
}

// ---- gradients

// The inputs that contain the choice of experts: routing map, bit map or indices. The first that is
// not NULL is read.
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
  // Returns a bit mask: bit j is set if the lane's j-th expert is chosen.
  template <int kLanes, int kPer>
  __device__ uint32_t get(int64_t token, int experts, int topk) const {
    const int lane = lane_index<kLanes>(), bytes = (experts + 7) / 8;
    uint32_t chosen = 0;
    if (map == nullptr && bits == nullptr) {
      for (int i = 0; i < topk && experts > 0; ++i) {
        const int64_t at = token * topk + i, e = index(at);
        if (e < 0 || e >= experts) {
          if (lane == 0) note(errors, ValueRule::kChosenExpert, at, e, experts);
        } else if (e / kPer == lane) {
          chosen |= 1u << e % kPer;
        }
      }
      return chosen;
    }
#pragma unroll
    for (int j = 0; j < kPer; j += kGroup) {
      const int first = lane * kPer + j, n = min(experts - first, kGroup);
      if (n <= 0) continue;
      const uint8_t* const from = map + token * experts + first;
      if (map == nullptr) {
        chosen |= (bits[token * bytes + first / 8] & (0xFFu >> (8 - n))) << j;
      } else if (n == kGroup && reinterpret_cast<uintptr_t>(from) % sizeof(uint2) == 0) {
        const uint2 words = *reinterpret_cast<const uint2*>(from);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          if (((i < 4 ? words.x : words.y) >> i % 4 * 8 & 0xFFu) != 0) chosen |= 1u << (j + i);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          if (i < n && from[i] != 0) chosen |= 1u << (j + i);
        }
      }
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

// Turns g, the gradient of the scores, into the gradient of the logits. Sums are over the experts
// whose bits are set in `counts`; bits past the last expert must be 0.
template <int kLanes, int kPer>
__device__ inline void gradient_row(int function, bool divides, uint32_t counts,
                                    const float (&saved)[kPer], float (&g)[kPer]) {
  float y[kPer], sum = 0.0f, dot = 0.0f;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    y[j] = function == TE_FL_SCORE_FUNCTION_SQRTSOFTPLUS ? sqrt_softplus(saved[j]) : saved[j];
    if ((counts >> j & 1u) == 0) continue;
    sum += y[j], dot = fmaf(g[j], y[j], dot);
  }
  dot = sum_of_lanes<kLanes>(dot);
  if (function == TE_FL_SCORE_FUNCTION_SOFTMAX) {
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      g[j] = (counts >> j & 1u) != 0 ? y[j] * (g[j] - dot) : 0.0f;
    }
    return;
  }
  const float share = 1.0f / (sum_of_lanes<kLanes>(sum) + 1e-20f);
  // Multiplies twice, because the square of a large `share` overflows FP32.
  const float less = dot * share * share;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    if (divides) g[j] = (counts >> j & 1u) != 0 ? fmaf(g[j], share, -less) : 0.0f;
    if (function == TE_FL_SCORE_FUNCTION_SIGMOID) {
      g[j] *= y[j] * (1.0f - y[j]);
    } else {
      g[j] *= sqrt_softplus_slope(saved[j], y[j]);
    }
  }
}

template <int kLanes, int kPer>
__global__ void __launch_bounds__(kThreads)
    topk_gradient_kernel(ChoiceInputs choice, RowSource saved, RowSource grad_probs, RouterShape r,
                         RowTarget grad_logits) {
  for_tokens_of_lanes<kLanes>(r, [&](int64_t token, int experts) {
    const uint32_t chosen = choice.get<kLanes, kPer>(token, experts, r.topk);
    float g[kPer], y[kPer];
    grad_probs.load<kLanes>(token, experts, 0.0f, g);
    saved.load<kLanes>(token, experts, 0.0f, y);
#pragma unroll
    for (int j = 0; j < kPer; ++j) g[j] = (chosen >> j & 1u) != 0 ? g[j] * r.scaling : 0.0f;
    gradient_row<kLanes>(r.function, r.topk > 1,
                         r.before ? experts_of_lane<kLanes, kPer>(experts) : chosen, y, g);
    if (!r.before) {
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        if ((chosen >> j & 1u) == 0) g[j] = 0.0f;  // overrides the NaN of 0 times infinity
      }
    }
    grad_logits.store<kLanes>(token, experts, g);
  });
}

template <int kLanes, int kPer>
__global__ void __launch_bounds__(kThreads)
    scores_gradient_kernel(RowSource saved, RowSource grad_scores, RouterShape r,
                           RowTarget grad_logits) {
  for_tokens_of_lanes<kLanes>(r, [&](int64_t token, int experts) {
    float g[kPer], y[kPer];
    grad_scores.load<kLanes>(token, experts, 0.0f, g);
    saved.load<kLanes>(token, experts, 0.0f, y);
    gradient_row<kLanes>(r.function, true, experts_of_lane<kLanes, kPer>(experts), y, g);
    grad_logits.store<kLanes>(token, experts, g);
  });
}

}  // namespace te_fl::cuda
