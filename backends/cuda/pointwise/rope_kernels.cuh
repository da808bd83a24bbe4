// The kernel of rotary position embedding, on separate or packed Q, K, V.
//
// A block processes all heads of a few tokens. It computes the cosines and sines of a token's
// angles once, into shared memory, while the first loads are in flight. One thread processes both
// elements of a pair, so input and output may be the same memory.
#pragma once

#include "common/pack.cuh"
#include "common/value_errors.cuh"
#include "pointwise/rope_positions.hpp"

namespace te_fl::cuda {

// Computes the positions of tokens. With context parallelism, a rank holds the chunks cp_rank and 2
// cp_size - 1 - cp_rank of the 2 cp_size chunks of each sequence.
struct Positions {
  int64_t extent0 = 1, extent1 = 1;  // extents of the tensor's leading dimensions
  bool sbhd = true;
  const int32_t* starts = nullptr;  // start positions by sequence; NULL: 0
  const int32_t* cu = nullptr;  // thd: cumulative lengths [batch + 1] of the sequences on all ranks
  int64_t batch = 0, cp_size = 1, cp_rank = 0;

  __device__ int64_t local(int64_t s, int64_t length) const {
    if (cp_size == 1) return s;
    const int64_t chunk = length / 2;
    return s < chunk ? cp_rank * chunk + s : (2 * cp_size - 1 - cp_rank) * chunk + s - chunk;
  }
  // An invalid start or length gives a position beyond every table, where the angles are NaN.
  __device__ static int64_t checked(int64_t position) {
    return position < 0 ? INT64_MAX : position;
  }
  // Returns -1 for a thd token outside every sequence.
  __device__ int64_t of(int64_t token) const {
    if (cu == nullptr) {
      const int64_t s = sbhd ? token / extent1 : token % extent1;
      const int64_t b = sbhd ? token % extent1 : token / extent1;
      return checked((starts != nullptr ? starts[b] : 0) + local(s, sbhd ? extent0 : extent1));
    }
    int64_t low = 0, high = batch;  // the last sequence that starts at or before the token
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (cu[middle + 1] / cp_size <= token) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (low == batch || token < cu[low] / cp_size) return -1;
    const int64_t begin = cu[low] / cp_size;
    return checked((starts != nullptr ? starts[low] : 0) +
                   local(token - begin, cu[low + 1] / cp_size - begin));
  }
};

// Checks a call's start positions and sequence lengths and records errors. Each thread checks one
// sequence.
static __global__ void __launch_bounds__(kThreads)
    position_check_kernel(PositionRules rules, ValueErrorSink sink) {
  for (int64_t b = blockIdx.x * int64_t{kThreads} + threadIdx.x; b < rules.batch;
       b += int64_t{gridDim.x} * kThreads) {
    ValueError e;
    if (find_position_error(rules, b, e)) {
      note(sink, e.rule, e.at, e.value, e.bound, e.more, e.argument);
    }
  }
}

struct Rotation {
  const float* angles = nullptr;
  int64_t columns = 0, rows = 0;
  bool interleaved = false, backward = false;

  __device__ int partner(int d) const {
    const int half = static_cast<int>(columns) / 2;
    return interleaved ? d ^ 1 : d < half ? d + half : d - half;
  }
};

// A head of one token in the input and the output. `table`: index of its angle table; -1: the head
// is copied.
template <class T>
struct Head {
  const T* in;
  T* out;
  int width, table;
};

template <class T>
struct Separate {
  const T* in;
  T* out;
  int64_t heads;
  int width;
  __device__ Head<T> at(int64_t token, uint32_t head) const {
    const int64_t begin = (token * heads + head) * width;
    return {in + begin, out + begin, width, 0};
  }
};

// Packed QKV. Each group has q_heads queries of k_dim elements, a key of k_dim and a value of
// v_dim.
struct Packed {
  int64_t tokens, groups, q_heads, k_dim, v_dim;
  int64_t width() const { return q_heads * k_dim + k_dim + v_dim; }
};
// Converts between the packed tensor and separate Q, K and V. kIntoPacked: the packed tensor is the
// output.
template <class T, bool kIntoPacked>
struct Joined {
  template <bool kConst>
  using Pointer = std::conditional_t<kConst, const T*, T*>;
  Pointer<!kIntoPacked> packed;
  Pointer<kIntoPacked> q, k, v;
  int64_t groups;
  int q_heads, k_dim, v_dim;
  FastDiv by_group;  // each group has q_heads + 2 heads

  __device__ Head<T> at(int64_t token, uint32_t head) const {
    uint32_t j = 0;
    const int64_t group = token * groups + by_group(head, j);
    const int64_t within = static_cast<int64_t>(j) * k_dim;
    const auto whole = packed + group * ((q_heads + int64_t{1}) * k_dim + v_dim) + within;
    const auto queries = static_cast<uint32_t>(q_heads);
    if (j < queries) return make_head(whole, q + group * q_heads * k_dim + within, k_dim, 0);
    if (j == queries) return make_head(whole, k + group * k_dim, k_dim, 1);
    return make_head(whole, v + group * v_dim, v_dim, -1);
  }
  template <class Whole, class Part>
  __device__ static Head<T> make_head(Whole whole, Part part, int width, int table) {
    if constexpr (kIntoPacked) {
      return {part, whole, width, table};
    } else {
      return {whole, part, width, table};
    }
  }
};

// The division of a launch's work. An item is what a thread processes at once: 16 elements in two
// packs or, if alignment or odd sizes prevent that, a pair or a single element.
struct RopePlan {
  Rotation rotation[2];
  int64_t tokens = 0;
  uint32_t tokens_each = 1, heads = 0, items = 0;  // tokens per block, heads per token, items per
                                                   // head
  int64_t repeat = 1;                              // number of adjacent tokens with the same
                                                   // position
  uint32_t columns = 0;                            // columns of both tables together
  bool shared = true;                              // the tables fit in shared memory
  bool same = false;                               // Q and K use the same table
  FastDiv by_items, by_heads, by_columns;

  // Uses a conditional instead of rotation[table], because an index known only at run time would
  // move the plan to local memory.
  __device__ Rotation of(int table) const { return table == 1 ? rotation[1] : rotation[0]; }
  // The rotated columns of a head; 0 for heads that are copied.
  __device__ int columns_of(int table) const {
    const int64_t rotated = table == 1 ? rotation[1].columns : rotation[0].columns;
    return table < 0 ? 0 : static_cast<int>(rotated);
  }
  // Offset of a table's cosines, in floats. Its sines follow after as many floats as it has
  // columns.
  __device__ uint32_t table_at(uint32_t which, int table) const {
    const bool second = table == 1 && !same;
    return (which * columns + (second ? static_cast<uint32_t>(rotation[0].columns) : 0)) * 2;
  }
};

// Returns the index of column d in a table in shared memory. kPacked: consecutive threads read runs
// of eight columns, and the first halves of all runs are stored before the second halves, which
// avoids bank conflicts.
template <bool kPacked>
__device__ inline uint32_t table_slot(uint32_t d, uint32_t columns) {
  if (!kPacked) return d;
  return ((d >> 2 & 1u) * (columns >> 3) + (d >> 3)) * 4 + (d & 3u);
}

// Computes the cosine and the signed sine of column d. y_d = x_d cos - x_partner sin for the first
// element of a pair, and x_d cos + x_partner sin for the second. The backward is the transposed
// map, which also holds if a pair's angles differ.
__device__ inline void read_angle(const Rotation& r, int64_t position, int d, float& cosine,
                                float& sine) {
  if (position >= r.rows) {
    cosine = sine = NAN;
    return;
  }
  const float* row = r.angles + position * r.columns;
  sincosf(row[d], &sine, &cosine);
  if (r.backward) sine = -sinf(row[r.partner(d)]);
}

// The decoded index of a work item.
template <class T>
struct ItemPlace {
  Head<T> head;
  int item = 0;
  uint32_t token = 0;  // index of the token in the block
};

constexpr uint32_t kMostTokens = 32;  // maximum tokens per block

// Data about a block's tokens, in shared memory.
struct BlockTokens {
  int64_t position[kMostTokens];
  uint32_t table[kMostTokens];  // tokens with the same position share a table
  uint32_t owner[kMostTokens];  // per table: the token from whose position it is computed

  __device__ void find(const RopePlan& plan, const Positions& positions, int64_t first_token) {
    const int64_t token = first_token + threadIdx.x;
    position[threadIdx.x] = positions.of(token);
    const int64_t run = plan.repeat == 1 ? threadIdx.x : token / plan.repeat;
    const int64_t first_run = plan.repeat == 1 ? 0 : first_token / plan.repeat;
    const auto mine = static_cast<uint32_t>(run - first_run);
    table[threadIdx.x] = mine;
    if (threadIdx.x == 0 || token == run * plan.repeat || plan.repeat == 1) {
      owner[mine] = threadIdx.x;
    }
  }
};

template <class T>
struct PackItem {
  Pack<T, kGroup> a, b;
  T* to = nullptr;
  int first = 0, second = 0, table = -1;
  uint32_t token = 0;

  __device__ void load(const ItemPlace<T>& place, const RopePlan& plan) {
    const Head<T>& h = place.head;
    const int columns = plan.columns_of(h.table);
    const int pairs = columns / (2 * kGroup);
    if (place.item < pairs) {
      table = h.table;
      first = place.item * kGroup;
      second = first + columns / 2;  // also for interleaved pairs: a pack has complete pairs
    } else {
      table = -1;
      const int at = place.item - pairs;
      const int items = (h.width - columns + 2 * kGroup - 1) / (2 * kGroup);
      first = at < items ? columns + at * kGroup : h.width;
      second = first + items * kGroup;
    }
    to = h.out;
    token = place.token;
    if (first >= h.width) first = -1;
    if (second >= h.width) second = -1;
    if (first >= 0) a.load(h.in + first);
    if (second >= 0) b.load(h.in + second);
  }
  __device__ void store(const RopePlan& plan, const float* tables, const BlockTokens& tokens) {
    const bool outside = tokens.position[token] < 0;
    const uint32_t at = tokens.table[token];
    if (table >= 0 && !outside) {
      if (plan.rotation[0].interleaved) {
        rotate_neighbours(plan, tables, at);
      } else {
        rotate_halves(plan, tables, at);
      }
    }
    if (outside) a = b = Pack<T, kGroup>{};
    if (first >= 0) a.store(to + first);
    if (second >= 0) b.store(to + second);
  }
  // Loads the cosines and sines of columns d to d + 3. d must be a multiple of 4.
  __device__ void angles(const RopePlan& plan, const float* tables, uint32_t which, int d,
                         float4& cosine, float4& sine) const {
    const auto columns = static_cast<uint32_t>(plan.columns_of(table));
    const float* at = tables + plan.table_at(which, table) + table_slot<true>(d, columns);
    cosine = *reinterpret_cast<const float4*>(at);
    sine = *reinterpret_cast<const float4*>(at + columns);
  }
  __device__ static float component(const float4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
  }
  __device__ void rotate_halves(const RopePlan& plan, const float* tables, uint32_t at) {
    float ya[kGroup], yb[kGroup];
#pragma unroll
    for (int half = 0; half < kGroup; half += 4) {
      float4 ca, sa, cb, sb;
      angles(plan, tables, at, first + half, ca, sa);
      angles(plan, tables, at, second + half, cb, sb);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float xa = a[half + i], xb = b[half + i];
        ya[half + i] = xa * component(ca, i) - xb * component(sa, i);
        yb[half + i] = xb * component(cb, i) + xa * component(sb, i);
      }
    }
    a.set(ya);
    b.set(yb);
  }
  __device__ void rotate_neighbours(const RopePlan& plan, const float* tables, uint32_t at) {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      Pack<T, kGroup>& x = which == 0 ? a : b;
      float y[kGroup];
#pragma unroll
      for (int half = 0; half < kGroup; half += 4) {
        float4 c, s;
        angles(plan, tables, at, (which == 0 ? first : second) + half, c, s);
        const float x0 = x[half], x1 = x[half + 1], x2 = x[half + 2], x3 = x[half + 3];
        y[half] = x0 * c.x - x1 * s.x;
        y[half + 1] = x1 * c.y + x0 * s.y;
        y[half + 2] = x2 * c.z - x3 * s.z;
        y[half + 3] = x3 * c.w + x2 * s.w;
      }
      x.set(y);
    }
  }
};

template <class T>
struct PairItem {
  float a = 0, b = 0;
  T* to = nullptr;
  int first = -1, second = -1, table = -1;
  uint32_t token = 0;

  __device__ void load(const ItemPlace<T>& place, const RopePlan& plan) {
    const Head<T>& h = place.head;
    const int columns = plan.columns_of(h.table);
    const int pairs = columns / 2;
    first = second = table = -1;
    to = h.out;
    token = place.token;
    if (place.item < pairs) {
      table = h.table;
      first = place.item * (plan.rotation[0].interleaved ? 2 : 1);
      second = plan.of(table).partner(first);
      b = to_f32(h.in[second]);
    } else if (columns + place.item - pairs < h.width) {
      first = columns + place.item - pairs;
    }
    if (first >= 0) a = to_f32(h.in[first]);
  }
  __device__ void store(const RopePlan& plan, const float* tables, const BlockTokens& tokens) {
    if (first < 0) return;
    const int64_t position = tokens.position[token];
    float ya = a, yb = b;
    if (position < 0) {
      ya = yb = 0.0f;
    } else if (table >= 0) {
      float ca, sa, cb, sb;
      const Rotation r = plan.of(table);
      if (plan.shared) {
        const float* at = tables + plan.table_at(tokens.table[token], table);
        ca = at[first], sa = at[r.columns + first];
        cb = at[second], sb = at[r.columns + second];
      } else {
        read_angle(r, position, first, ca, sa);
        read_angle(r, position, second, cb, sb);
      }
      ya = a * ca - b * sa;
      yb = b * cb + a * sb;
    }
    to[first] = from_f32<T>(ya);
    if (second >= 0) to[second] = from_f32<T>(yb);
  }
};

// Computes the angles of the block's tokens. Each column's cosine and sine are computed once.
template <bool kPacked>
__device__ inline void fill_tables(const RopePlan& plan, const BlockTokens& tokens, uint32_t count,
                                   float* tables) {
  const uint32_t size = (tokens.table[count - 1] + 1) * plan.columns;
  for (uint32_t k = threadIdx.x; k < size; k += kThreads) {
    uint32_t d = 0;
    const uint32_t which = plan.by_columns(k, d);
    const int64_t position = tokens.position[tokens.owner[which]];
    if (position < 0) continue;
    const auto columns0 = static_cast<uint32_t>(plan.rotation[0].columns);
    const int table = d < columns0 ? 0 : 1;
    if (table == 1) d -= columns0;
    const Rotation r = plan.of(table);
    const auto columns = static_cast<uint32_t>(r.columns);
    float sine = NAN, cosine = NAN;
    if (position < r.rows) sincosf(r.angles[position * columns + d], &sine, &cosine);
    float* at = tables + plan.table_at(which, table);
    at[table_slot<kPacked>(d, columns)] = cosine;
    // In the backward, the sine is negated and stored for the partner column: see read_angle().
    const auto to = r.backward ? static_cast<uint32_t>(r.partner(static_cast<int>(d))) : d;
    at[columns + table_slot<kPacked>(to, columns)] = r.backward ? -sine : sine;
  }
}

template <class T, class Heads, bool kPacked>
__global__ void __launch_bounds__(kThreads, 3)
    rope_kernel(Heads heads, RopePlan plan, Positions positions) {
  using Item = std::conditional_t<kPacked, PackItem<T>, PairItem<T>>;
  constexpr int kAtOnce = 2;
  extern __shared__ float4 memory[];  // the tables; float4 for alignment
  __shared__ BlockTokens tokens;
  float* tables = &memory[0].x;
  const int64_t first_token = blockIdx.x * int64_t{plan.tokens_each};
  const int64_t left = plan.tokens - first_token;
  const uint32_t count = left < plan.tokens_each ? static_cast<uint32_t>(left) : plan.tokens_each;
  const uint32_t items = count * plan.heads * plan.items;
  Item held[kAtOnce];
  const auto load = [&](uint32_t at) {
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const uint32_t j = at + u * kThreads + threadIdx.x;
      if (j >= items) continue;
      uint32_t item = 0, head = 0;
      const uint32_t token = plan.by_heads(plan.by_items(j, item), head);
      held[u].load({heads.at(first_token + token, head), static_cast<int>(item), token}, plan);
    }
  };
  load(0);
  if (threadIdx.x < count) tokens.find(plan, positions, first_token);
  __syncthreads();
  if (plan.shared) fill_tables<kPacked>(plan, tokens, count, tables);
  __syncthreads();
  for (uint32_t at = 0; at < items; at += kAtOnce * kThreads) {
    if (at != 0) load(at);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (at + u * kThreads + threadIdx.x < items) held[u].store(plan, tables, tokens);
    }
  }
}

}  // namespace te_fl::cuda
