// Attention in plain CUDA. Arithmetic is FP32, and FP8 calls also quantise P and dS. Tiles have 32
// x 32 scores, eight threads share a row, and the softmax is computed online. Accepts every layout,
// mask, bias, dropout and softmax type. Every sum is computed in a fixed order.
#include "attention/attention.cuh"
#include "attention/attention_hopper.hpp"
#include "device/shared_memory.hpp"

namespace te_fl::cuda {
namespace {

template <int kPerLane>  // elements of a head per thread
__global__ void __launch_bounds__(kThreads) forward_kernel(Attention p, HeadData o, float* lse) {
  extern __shared__ float shared[];
  const int64_t b = blockIdx.z, h = blockIdx.y, begin = int64_t{blockIdx.x} * kTileRows;
  const Span s = p.span(b);
  const int64_t rows = p.thd ? s.q_len : p.seqlen_q;
  if (begin >= rows) return;
  float* q_tile = shared;
  float* k_tile = q_tile + kTileRows * (p.q.dim + 1);
  float* v_tile = k_tile + kTileRows * (p.k.dim + 1);
  float* probabilities = v_tile + kTileRows * (p.v.dim + 1);  // shape [kTileRows][kTileRows + 1]
  const int r = row_of_thread(), lane = lane_of_thread();
  const int64_t i = begin + r, kv_head = p.kv_head(h);
  int64_t logical_rows, logical_cols;
  p.logical(logical_rows, logical_cols);
  const int64_t dropout_row = (b * p.heads + h) * logical_rows + i;
  load_tile(p.q, b, h, s.q_begin, begin, s.q_len, q_tile);
  RowSoftmax row;
  float out[kPerLane] = {};
  const backend::KeyRange keys = keys_of_tile(p, s, begin);
  for (int64_t k0 = keys.begin; k0 < keys.end; k0 += kTileRows) {
    __syncthreads();
    load_tile(p.k, b, kv_head, s.kv_begin, k0, s.kv_len, k_tile);
    load_tile(p.v, b, kv_head, s.kv_begin, k0, s.kv_len, v_tile);
    __syncthreads();
    const TileScores scores(p, s, b, h, i, k0, q_tile, k_tile);
    const float shrink = row.raise(fmaxf(row.top, row_max(scores.most)));
    float part = 0.0f;
#pragma unroll
    for (int c = 0; c < TileScores::kCount; ++c) {
      const int key = lane + c * kLanes;
      float value = 0.0f;
      if (!scores.hidden[c]) {
        value = RowSoftmax::exponential(scores.score[c], row.top);
        part += value;
        if (value != 0.0f) value *= p.dropout(dropout_row, logical_cols, k0 + key);
      }
      probabilities[r * (kTileRows + 1) + key] = value;
    }
    row.sum = row.sum * shrink + row_sum(part);
    __syncwarp();
#pragma unroll
    for (int d = 0; d < kPerLane; ++d) out[d] *= shrink;
    for (int c = 0; c < kTileRows; ++c) {
      const float value = probabilities[r * (kTileRows + 1) + c];
      if (value == 0.0f) continue;
#pragma unroll
      for (int d = 0; d < kPerLane; ++d) {
        const int at = lane + d * kLanes;
        if (at < p.v.dim) out[d] = fmaf(value, v_tile[c * (p.v.dim + 1) + at], out[d]);
      }
    }
  }
  float most = 0.0f;
  if (i < rows) {
    const bool empty = row.empty();
    const RowTotal total(row, p.sink_logit(h));
    const int64_t at = o.offset(b, s.q_begin + i, h);
#pragma unroll
    for (int d = 0; d < kPerLane; ++d) {
      const int element = lane + d * kLanes;
      if (element >= o.dim) continue;
      const float value = empty ? 0.0f : out[d] * total.factor / total.total;
      o.put(at + element * o.element, value);
      most = fold_amax(most, value);
    }
    if (lane == 0 && lse != nullptr) {
      lse[p.lse_index(s, b, h, i)] = empty ? -INFINITY : total.lse();
    }
  }
  join_amax(o.amax, most);
}

// delta = rowsum(dO O); 0 in rows without keys.
__global__ void __launch_bounds__(kThreads) delta_kernel(Attention p, AttentionGradients g) {
  const int64_t b = blockIdx.z, h = blockIdx.y;
  const Span s = p.span(b);
  const int64_t i = int64_t{blockIdx.x} * kTileRows + row_of_thread();
  float sum = 0.0f;
  if (i < s.q_len) {
    const int64_t o = g.o.offset(b, s.q_begin + i, h), d_o = g.d_o.offset(b, s.q_begin + i, h);
    for (int d = lane_of_thread(); d < g.o.dim; d += kLanes) {
      sum = fmaf(g.o.at(o + d * g.o.element), g.d_o.at(d_o + d * g.d_o.element), sum);
    }
  }
  sum = row_sum(sum);
  if (i < s.q_len && lane_of_thread() == 0) g.delta[p.lse_index(s, b, h, i)] = sum;
}

// The backward's values of one (query, key) pair: p, the probability after dropout; ds, the
// gradient of the score; dx, the gradient of the scaled q k^T before softcap. The parameter `dp` is
// the pair's element of dO V^T.
struct Pair {
  float p, ds, dx;
};
__device__ inline Pair compute_pair(const Attention& p, const Span& s, int64_t b, int64_t h, int64_t i,
                               int64_t j, float qk, float dp, float lse, float delta,
                               int64_t logical_rows, int64_t logical_cols) {
  const float probability = expf(p.score(s, b, h, i, j, qk) - lse);
  const float factor = p.dropout((b * p.heads + h) * logical_rows + i, logical_cols, j);
  const float ds = probability * (factor * dp - delta);
  return {probability * factor, ds, ds * p.score_slope(qk)};
}

// Blocks per multiprocessor: the most that shared memory allows for heads of up to 128 elements.
template <int kPerLane>
constexpr int kBlocks = kPerLane <= 16 ? 3 : 1;

template <int kPerLane>
__global__ void __launch_bounds__(kThreads, kBlocks<kPerLane>)
    dq_kernel(Attention p, AttentionGradients g) {
  extern __shared__ float shared[];
  const int64_t b = blockIdx.z, h = blockIdx.y, begin = int64_t{blockIdx.x} * kTileRows;
  const Span s = p.span(b);
  const int64_t rows = p.thd ? s.q_len : p.seqlen_q;
  if (begin >= rows) return;
  const int q_pitch = p.q.dim + 1, v_pitch = p.v.dim + 1;
  float* q_tile = shared;
  float* do_tile = q_tile + kTileRows * q_pitch;
  float* k_tile = do_tile + kTileRows * v_pitch;
  float* v_tile = k_tile + kTileRows * q_pitch;
  float* ds_tile = v_tile + kTileRows * v_pitch;
  const int r = row_of_thread(), lane = lane_of_thread();
  const int64_t i = begin + r, kv_head = p.kv_head(h);
  int64_t logical_rows, logical_cols;
  p.logical(logical_rows, logical_cols);
  load_tile(p.q, b, h, s.q_begin, begin, s.q_len, q_tile);
  load_tile(g.d_o, b, h, s.q_begin, begin, s.q_len, do_tile);
  const bool exists = i < s.q_len;
  const float lse = exists ? g.lse[p.lse_index(s, b, h, i)] : -INFINITY;
  const float delta = exists ? g.delta[p.lse_index(s, b, h, i)] : 0.0f;
  const RoundingScale ds_codes(g.ds_codes);
  float dq[kPerLane] = {}, most_ds = 0.0f;
  const backend::KeyRange keys = keys_of_tile(p, s, begin);
  for (int64_t k0 = keys.begin; k0 < keys.end; k0 += kTileRows) {
    __syncthreads();
    load_tile(p.k, b, kv_head, s.kv_begin, k0, s.kv_len, k_tile);
    load_tile(p.v, b, kv_head, s.kv_begin, k0, s.kv_len, v_tile);
    __syncthreads();
    for (int c = lane; c < kTileRows; c += kLanes) {
      float ds = 0.0f;
      if (exists && lse != -INFINITY && !p.masked(s, b, h, i, k0 + c)) {
        const float qk = dot(q_tile + r * q_pitch, k_tile + c * q_pitch, p.q.dim);
        const float dp = dot(do_tile + r * v_pitch, v_tile + c * v_pitch, p.v.dim);
        ds = compute_pair(p, s, b, h, i, k0 + c, qk, dp, lse, delta, logical_rows, logical_cols).dx;
        most_ds = fold_amax(most_ds, ds);
        ds = ds_codes(ds);
      }
      ds_tile[r * (kTileRows + 1) + c] = ds;
    }
    __syncwarp();
    for (int c = 0; c < kTileRows; ++c) {
      const float ds = ds_tile[r * (kTileRows + 1) + c];
      if (ds == 0.0f) continue;
#pragma unroll
      for (int d = 0; d < kPerLane; ++d) {
        const int at = lane + d * kLanes;
        if (at < p.q.dim) dq[d] = fmaf(ds, k_tile[c * q_pitch + at], dq[d]);
      }
    }
  }
  join_amax(g.ds_codes.amax, most_ds);
  float most = 0.0f;
  if (i < rows) {
    const int64_t at = g.dq.offset(b, s.q_begin + i, h);
#pragma unroll
    for (int d = 0; d < kPerLane; ++d) {
      const int element = lane + d * kLanes;
      if (element >= p.q.dim) continue;
      g.dq.put(at + element * g.dq.element, p.scale * dq[d]);
      most = fold_amax(most, p.scale * dq[d]);
    }
  }
  join_amax(g.dq.amax, most);
}

template <int kPerLane>
__global__ void __launch_bounds__(kThreads, kBlocks<kPerLane>)
    dkv_kernel(Attention p, AttentionGradients g) {
  extern __shared__ float shared[];
  const int64_t b = blockIdx.z, kv_head = blockIdx.y, k0 = int64_t{blockIdx.x} * kTileRows;
  const Span s = p.span(b);
  const int64_t rows = p.thd ? s.kv_len : p.seqlen_kv;
  if (k0 >= rows) return;
  const int q_pitch = p.q.dim + 1, v_pitch = p.v.dim + 1;
  float* q_tile = shared;
  float* do_tile = q_tile + kTileRows * q_pitch;
  float* k_tile = do_tile + kTileRows * v_pitch;
  float* v_tile = k_tile + kTileRows * q_pitch;
  float* p_tile = v_tile + kTileRows * v_pitch;
  float* ds_tile = p_tile + kTileRows * (kTileRows + 1);
  const int r = row_of_thread(), lane = lane_of_thread();
  int64_t logical_rows, logical_cols;
  p.logical(logical_rows, logical_cols);
  load_tile(p.k, b, kv_head, s.kv_begin, k0, s.kv_len, k_tile);
  load_tile(p.v, b, kv_head, s.kv_begin, k0, s.kv_len, v_tile);
  const RoundingScale p_codes(g.p_codes), ds_codes(g.ds_codes);
  float dk[kPerLane] = {}, dv[kPerLane] = {};
  const int64_t group = p.heads / p.kv_heads;
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    for (int64_t begin = 0; begin < s.q_len; begin += kTileRows) {
      const backend::KeyRange keys = keys_of_tile(p, s, begin);
      // This condition is uniform over the block.
      if (keys.end <= k0 || keys.begin >= k0 + kTileRows) continue;
      __syncthreads();
      load_tile(p.q, b, h, s.q_begin, begin, s.q_len, q_tile);
      load_tile(g.d_o, b, h, s.q_begin, begin, s.q_len, do_tile);
      __syncthreads();
      const int64_t i = begin + r;
      const bool exists = i < s.q_len;
      const float lse = exists ? g.lse[p.lse_index(s, b, h, i)] : -INFINITY;
      const float delta = exists ? g.delta[p.lse_index(s, b, h, i)] : 0.0f;
      for (int c = lane; c < kTileRows; c += kLanes) {
        float probability = 0.0f, ds = 0.0f;
        if (exists && lse != -INFINITY && !p.masked(s, b, h, i, k0 + c)) {
          const float qk = dot(q_tile + r * q_pitch, k_tile + c * q_pitch, p.q.dim);
          const float dp = dot(do_tile + r * v_pitch, v_tile + c * v_pitch, p.v.dim);
          const Pair pair =
              compute_pair(p, s, b, h, i, k0 + c, qk, dp, lse, delta, logical_rows, logical_cols);
          probability = p_codes(pair.p);
          ds = ds_codes(pair.dx);
        }
        p_tile[r * (kTileRows + 1) + c] = probability;
        ds_tile[r * (kTileRows + 1) + c] = ds;
      }
      __syncthreads();
      for (int query = 0; query < kTileRows; ++query) {
        const float probability = p_tile[query * (kTileRows + 1) + r];
        const float ds = ds_tile[query * (kTileRows + 1) + r];
#pragma unroll
        for (int d = 0; d < kPerLane; ++d) {
          const int at = lane + d * kLanes;
          if (probability != 0.0f && at < p.v.dim) {
            dv[d] = fmaf(probability, do_tile[query * v_pitch + at], dv[d]);
          }
          if (ds != 0.0f && at < p.q.dim) dk[d] = fmaf(ds, q_tile[query * q_pitch + at], dk[d]);
        }
      }
    }
  }
  float most_k = 0.0f, most_v = 0.0f;
  if (k0 + r < rows) {
    const int64_t dk_at = g.dk.offset(b, s.kv_begin + k0 + r, kv_head);
    const int64_t dv_at = g.dv.offset(b, s.kv_begin + k0 + r, kv_head);
#pragma unroll
    for (int d = 0; d < kPerLane; ++d) {
      const int element = lane + d * kLanes;
      if (element < p.q.dim) {
        g.dk.put(dk_at + element * g.dk.element, p.scale * dk[d]);
        most_k = fold_amax(most_k, p.scale * dk[d]);
      }
      if (element < p.v.dim) {
        g.dv.put(dv_at + element * g.dv.element, dv[d]);
        most_v = fold_amax(most_v, dv[d]);
      }
    }
  }
  join_amax(g.dk.amax, most_k);
  join_amax(g.dv.amax, most_v);
}

__device__ inline float global_dot(const HeadData& x, int64_t at, const HeadData& y,
                                   int64_t other) {
  float sum = 0.0f;
  for (int d = 0; d < x.dim; ++d) {
    sum = fmaf(x.at(at + d * x.element), y.at(other + d * y.element), sum);
  }
  return sum;
}

// Each thread sums one element of dbias over the dimensions in which dbias has extent 1.
__global__ void __launch_bounds__(kThreads) dbias_kernel(Attention p, AttentionGradients g) {
  const int64_t pairs = p.seqlen_q * p.seqlen_kv;
  const int64_t n = g.dbias_batches * g.dbias_heads * pairs;
  for (int64_t e = blockIdx.x * int64_t{kThreads} + threadIdx.x; e < n;
       e += int64_t{gridDim.x} * kThreads) {
    const int64_t j = e % p.seqlen_kv, i = e / p.seqlen_kv % p.seqlen_q;
    const int64_t bias_h = e / pairs % g.dbias_heads, bias_b = e / pairs / g.dbias_heads;
    const int64_t last_b = g.dbias_batches == 1 ? p.batch : bias_b + 1;
    const int64_t last_h = g.dbias_heads == 1 ? p.heads : bias_h + 1;
    float sum = 0.0f;
    for (int64_t b = bias_b; b < last_b; ++b) {
      const Span s = p.span(b);
      for (int64_t h = bias_h; h < last_h; ++h) {
        if (i >= s.q_len || p.masked(s, b, h, i, j)) continue;
        const float lse = g.lse[p.lse_index(s, b, h, i)];
        if (lse == -INFINITY) continue;
        const int64_t kv_head = p.kv_head(h);
        const float qk = global_dot(p.q, p.q.offset(b, i, h), p.k, p.k.offset(b, j, kv_head));
        const float dp = global_dot(p.v, p.v.offset(b, j, kv_head), g.d_o, g.d_o.offset(b, i, h));
        sum += compute_pair(p, s, b, h, i, j, qk, dp, lse, g.delta[p.lse_index(s, b, h, i)], p.seqlen_q,
                       p.seqlen_kv)
                   .ds;
      }
    }
    HeadData out;
    out.data = g.dbias.data;
    out.dtype = g.dbias.dtype;
    out.put(g.dbias.offset(bias_b, bias_h, i, j), sum);
  }
}

// Each block computes dsink of one head: -sum over rows of exp(sink - lse) delta.
__global__ void __launch_bounds__(kThreads) dsink_kernel(Attention p, AttentionGradients g) {
  __shared__ float warps[kThreads / 32];
  const int64_t h = blockIdx.x;
  const float sink = p.sink_logit(h);
  float sum = 0.0f;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Span s = p.span(b);
    for (int64_t i = threadIdx.x; i < s.q_len; i += kThreads) {
      const int64_t at = p.lse_index(s, b, h, i);
      if (g.lse[at] != -INFINITY) sum -= expf(sink - g.lse[at]) * g.delta[at];
    }
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  sum = 0.0f;
  for (const float part : warps) sum += part;
  g.dsink[h * g.dsink_stride] = sum;
}

__global__ void __launch_bounds__(kThreads)
    clear_kernel_heads(HeadData t, int64_t batch, int64_t seqlen, int64_t heads, float* lse) {
  const int64_t n = batch * seqlen * heads;
  for (int64_t e = blockIdx.x * int64_t{kThreads} + threadIdx.x; e < n;
       e += int64_t{gridDim.x} * kThreads) {
    const int64_t h = e % heads, s = e / heads % seqlen, b = e / heads / seqlen;
    for (int d = 0; d < t.dim; ++d) t.put(t.offset(b, s, h) + d * t.element, 0.0f);
    if (lse != nullptr) lse[e] = -INFINITY;
  }
}

template <int kPerLane>
void launch_scalar_forward(const te_fl_context& ctx, const Attention& p, const HeadData& o, float* lse) {
  const size_t bytes = 2 * tile_bytes(p.q.dim) + tile_bytes(p.v.dim) + score_bytes();
  static SharedMemory shared;
  shared.require(ctx.device.index, forward_kernel<kPerLane>, bytes);
  const cudaStream_t stream = stream_of(ctx);
  if (p.thd) clear_heads(stream, o, 1, p.seqlen_q, p.heads, lse);
  forward_kernel<kPerLane>
      <<<tiles(p.seqlen_q, p.heads, p.batch), kThreads, bytes, stream>>>(p, o, lse);
  check_launch("forward_kernel");
}

void clear_gradients(cudaStream_t stream, const Attention& p, const AttentionGradients& g) {
  if (!p.thd) return;
  clear_heads(stream, g.dq, 1, p.seqlen_q, p.heads, nullptr);
  clear_heads(stream, g.dk, 1, p.seqlen_kv, p.kv_heads, nullptr);
  clear_heads(stream, g.dv, 1, p.seqlen_kv, p.kv_heads, nullptr);
}

template <int kPerLane>
void launch_scalar_backward(const te_fl_context& ctx, const Attention& p, const AttentionGradients& g) {
  const size_t operands = 2 * (tile_bytes(p.q.dim) + tile_bytes(p.v.dim));
  const size_t dq_bytes = operands + score_bytes(), dkv_bytes = operands + 2 * score_bytes();
  static SharedMemory dq_shared, dkv_shared;
  dq_shared.require(ctx.device.index, dq_kernel<kPerLane>, dq_bytes);
  dkv_shared.require(ctx.device.index, dkv_kernel<kPerLane>, dkv_bytes);
  const cudaStream_t stream = stream_of(ctx);
  clear_gradients(stream, p, g);
  if (p.seqlen_q > 0) {
    const dim3 grid = tiles(p.seqlen_q, p.heads, p.batch);
    delta_kernel<<<grid, kThreads, 0, stream>>>(p, g);
    check_launch("delta_kernel");
    dq_kernel<kPerLane><<<grid, kThreads, dq_bytes, stream>>>(p, g);
    check_launch("dq_kernel");
  }
  if (p.seqlen_kv > 0) {
    dkv_kernel<kPerLane>
        <<<tiles(p.seqlen_kv, p.kv_heads, p.batch), kThreads, dkv_bytes, stream>>>(p, g);
    check_launch("dkv_kernel");
  }
}

}  // namespace

void clear_heads(cudaStream_t stream, const HeadData& t, int64_t batch, int64_t seqlen,
                 int64_t heads, float* lse) {
  const int64_t n = batch * seqlen * heads;
  if (n == 0) return;
  clear_kernel_heads<<<blocks_for(n), kThreads, 0, stream>>>(t, batch, seqlen, heads, lse);
  check_launch("clear_kernel_heads");
}

void attention_forward(const te_fl_context& ctx, const Attention& p, const HeadData& o, float* lse,
                       const Rounding& rounding, bool tensor_cores) {
  if (p.seqlen_q == 0) return;
  if (p.batch == 0) {
    if (p.thd) clear_heads(stream_of(ctx), o, 1, p.seqlen_q, p.heads, lse);
    return;
  }
  if (tensor_cores) return hopper_attention_forward(ctx, p, o, lse);
  if (rounding.scale != nullptr) return quantised_forward(ctx, p, o, lse, rounding);
  if (p.v.dim <= 64) return launch_scalar_forward<8>(ctx, p, o, lse);
  if (p.v.dim <= 128) return launch_scalar_forward<16>(ctx, p, o, lse);
  launch_scalar_forward<32>(ctx, p, o, lse);
}

void attention_backward(const te_fl_context& ctx, const Attention& p, const AttentionGradients& g,
                        bool tensor_cores) {
  const cudaStream_t stream = stream_of(ctx);
  const int dim = std::max(p.q.dim, p.v.dim);
  if (p.batch == 0) {
    clear_gradients(stream, p, g);
  } else if (tensor_cores) {
    clear_gradients(stream, p, g);
    hopper_attention_backward(ctx, p, g);
  } else if (dim <= 64) {
    launch_scalar_backward<8>(ctx, p, g);
  } else if (dim <= 128) {
    launch_scalar_backward<16>(ctx, p, g);
  } else {
    launch_scalar_backward<32>(ctx, p, g);
  }
  if (g.dbias.data != nullptr && (p.batch == 0 || !tensor_cores)) {
    const int64_t n = g.dbias_batches * g.dbias_heads * p.seqlen_q * p.seqlen_kv;
    if (n > 0) {
      dbias_kernel<<<blocks_for(n), kThreads, 0, stream>>>(p, g);
      check_launch("dbias_kernel");
    }
  }
  if (g.dsink != nullptr) {
    dsink_kernel<<<static_cast<unsigned>(p.heads), kThreads, 0, stream>>>(p, g);
    check_launch("dsink_kernel");
  }
}

}  // namespace te_fl::cuda
