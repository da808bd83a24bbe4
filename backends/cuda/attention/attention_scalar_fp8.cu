// FP8 in the scalar attention kernels: the forward kernel that quantises P, and FP8 outputs.
#include "attention/attention_scalar_fp8.cuh"
#include "common/store.cuh"
#include "device/shared_memory.hpp"

namespace te_fl::cuda {
namespace {

// Like forward_kernel of attention_scalar.cu, but with two passes over the keys. It quantises
// exp(score - the row's largest score), whose precision does not depend on the number of keys.
template <int kPerLane>  // elements of a head per thread
__global__ void __launch_bounds__(kThreads)
    quantised_forward_kernel(Attention p, HeadData o, float* lse, Rounding rounding) {
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
  load_tile(p.q, b, h, s.q_begin, begin, s.q_len, q_tile);
  const backend::KeyRange keys = keys_of_tile(p, s, begin);

  RowSoftmax row;
  for (int64_t k0 = keys.begin; k0 < keys.end; k0 += kTileRows) {
    __syncthreads();
    load_tile(p.k, b, kv_head, s.kv_begin, k0, s.kv_len, k_tile);
    __syncthreads();
    const TileScores scores(p, s, b, h, i, k0, q_tile, k_tile);
    const float shrink = row.raise(fmaxf(row.top, row_max(scores.most)));
    float part = 0.0f;
#pragma unroll
    for (int c = 0; c < TileScores::kCount; ++c) {
      if (!scores.hidden[c]) part += RowSoftmax::exponential(scores.score[c], row.top);
    }
    row.sum = row.sum * shrink + row_sum(part);
  }

  const RowTotal total(row, p.sink_logit(h));
  const bool empty = row.empty();
  const float share = empty ? 0.0f : total.factor / total.total;
  const RoundingScale codes(rounding, p.kept);
  int64_t logical_rows, logical_cols;
  p.logical(logical_rows, logical_cols);
  const int64_t dropout_row = (b * p.heads + h) * logical_rows + i;
  float out[kPerLane] = {}, most_p = 0.0f;
  for (int64_t k0 = keys.begin; k0 < keys.end; k0 += kTileRows) {
    __syncthreads();
    load_tile(p.k, b, kv_head, s.kv_begin, k0, s.kv_len, k_tile);
    load_tile(p.v, b, kv_head, s.kv_begin, k0, s.kv_len, v_tile);
    __syncthreads();
    const TileScores scores(p, s, b, h, i, k0, q_tile, k_tile);
#pragma unroll
    for (int c = 0; c < TileScores::kCount; ++c) {
      const int key = lane + c * kLanes;
      float value = -1.0f;  // marks a hidden key, which is skipped even if its v is NaN
      if (!scores.hidden[c] && !empty) {
        value = RowSoftmax::exponential(scores.score[c], row.top) *
                p.dropout(dropout_row, logical_cols, k0 + key);
        most_p = fold_amax(most_p, value * share);
        value = codes(value);
      }
      probabilities[r * (kTileRows + 1) + key] = value;
    }
    __syncwarp();
    for (int c = 0; c < kTileRows; ++c) {
      const float value = probabilities[r * (kTileRows + 1) + c];
      if (value < 0.0f) continue;
#pragma unroll
      for (int d = 0; d < kPerLane; ++d) {
        const int at = lane + d * kLanes;
        if (at < p.v.dim) out[d] = fmaf(value, v_tile[c * (p.v.dim + 1) + at], out[d]);
      }
    }
  }
  join_amax(rounding.amax, most_p);

  float most = 0.0f;
  if (i < rows) {
    const int64_t at = o.offset(b, s.q_begin + i, h);
#pragma unroll
    for (int d = 0; d < kPerLane; ++d) {
      const int element = lane + d * kLanes;
      if (element >= o.dim) continue;
      const float value = out[d] * share;
      o.put(at + element * o.element, value);
      most = fold_amax(most, value);
    }
    if (lane == 0 && lse != nullptr) {
      lse[p.lse_index(s, b, h, i)] = empty ? -INFINITY : total.lse();
    }
  }
  join_amax(o.amax, most);
}

template <int kPerLane>
void launch_scalar_forward_fp8(const te_fl_context& ctx, const Attention& p, const HeadData& o,
                          float* lse, const Rounding& rounding) {
  const size_t bytes = 2 * tile_bytes(p.q.dim) + tile_bytes(p.v.dim) + score_bytes();
  static SharedMemory shared;
  shared.require(ctx.device.index, quantised_forward_kernel<kPerLane>, bytes);
  const cudaStream_t stream = stream_of(ctx);
  if (p.thd) clear_heads(stream, o, 1, p.seqlen_q, p.heads, lse);
  quantised_forward_kernel<kPerLane>
      <<<tiles(p.seqlen_q, p.heads, p.batch), kThreads, bytes, stream>>>(p, o, lse, rounding);
  check_launch("quantised_forward_kernel");
}

struct Scales {
  Quantised of[4];
  int count;
};
__global__ void scales_kernel(Scales s) {
  for (int i = 0; i < s.count; ++i) s.of[i].write_tensor_scale(s.of[i].tensor_scale());
}

__device__ inline uint8_t encode_fp8(float x, bool is_e5m2) {
  return is_e5m2 ? from_f32<e5m2>(x).__x : from_f32<e4m3>(x).__x;
}

__global__ void __launch_bounds__(kThreads) staged_codes_kernel(StagedCodes t) {
  const float scale = t.q.tensor_scale();
  auto* const rows = static_cast<uint8_t*>(t.q.rows);
  auto* const columns = static_cast<uint8_t*>(t.q.columns);
  for (int64_t e = blockIdx.x * int64_t{kThreads} + threadIdx.x; e < t.count;
       e += int64_t{gridDim.x} * kThreads) {
    const uint8_t code = encode_fp8(t.values[e] * scale, t.q.is_e5m2);
    if (rows != nullptr) rows[t.offset(e)] = code;
    if (columns != nullptr) columns[e % t.q.k * t.q.m + e / t.q.k] = code;
  }
}

bool computes_scale(const te_fl_tensor& t) {
  return (t.quant->flags & TE_FL_QUANT_COMPUTE_SCALE) != 0;
}
bool is_staged(const te_fl_tensor& t) {
  if (backend::scaling(t) == TE_FL_SCALING_NONE) return false;
  return computes_scale(t) || t.quant->columnwise_data != nullptr || t.dl.data == nullptr;
}
constexpr size_t kFoundBytes = 256;  // the amax for a computed scale, in front of the values

}  // namespace

void quantised_forward(const te_fl_context& ctx, const Attention& p, const HeadData& o, float* lse,
                       const Rounding& rounding) {
  if (p.v.dim <= 64) return launch_scalar_forward_fp8<8>(ctx, p, o, lse, rounding);
  if (p.v.dim <= 128) return launch_scalar_forward_fp8<16>(ctx, p, o, lse, rounding);
  launch_scalar_forward_fp8<32>(ctx, p, o, lse, rounding);
}

size_t CodesOutputs::bytes(const te_fl_tensor& t) {
  if (!is_staged(t)) return 0;
  const int64_t values = backend::numel(t) * static_cast<int64_t>(sizeof(float));
  return kFoundBytes + static_cast<size_t>(round_up(values, 256));
}

HeadData CodesOutputs::heads(const te_fl_tensor& t, int32_t layout) {
  HeadData d = head_data(t, layout);
  if (backend::scaling(t) == TE_FL_SCALING_NONE) return d;
  Quantised q = quantised(t, nullptr, FLT_MAX);
  d.factor = q.scale;
  d.amax = q.amax;
  if (is_staged(t)) {
    auto* const found = reinterpret_cast<float*>(scratch_);
    if (computes_scale(t)) q.found = d.amax = found;
    d.data = scratch_ + kFoundBytes;
    d.dtype = TE_FL_F32;
    d.factor = nullptr;
    scratch_ += bytes(t);
    StagedCodes& staged = staged_[staged_count_++];
    staged.values = static_cast<const float*>(d.data);
    staged.q = q;
    staged.count = backend::numel(t);
    staged.ndim = t.dl.ndim;
    int64_t compact[4], step = 1;
    for (int i = t.dl.ndim - 1; i >= 0; --i) {
      staged.shape[i] = t.dl.shape[i];
      staged.stride[i] = backend::stride(t, i);
      compact[i] = step;
      step *= t.dl.shape[i];
    }
    const int head = t.dl.ndim - 2;
    const bool thd = layout == TE_FL_LAYOUT_THD, sequence_first = layout == TE_FL_LAYOUT_SBHD;
    d.batch = thd ? 0 : compact[sequence_first ? 1 : 0];
    d.seq = compact[thd || sequence_first ? 0 : 1];
    d.head = compact[head];
    d.element = 1;
  }
  scales_[scale_count_++] = q;
  return d;
}

Rounding CodesOutputs::rounding(const te_fl_tensor* t, bool written) {
  Rounding r;
  if (t == nullptr) return r;
  Quantised q = quantised(*t, nullptr, FLT_MAX);
  r.scale = q.scale;
  r.is_e5m2 = q.is_e5m2;
  if (!written) return r;
  r.amax = q.amax;
  scales_[scale_count_++] = q;
  return r;
}

void CodesOutputs::prepare() const {
  for (int i = 0; i < staged_count_; ++i) {
    if (staged_[i].q.found == nullptr) continue;
    check(
        cudaMemsetAsync(const_cast<float*>(staged_[i].q.found), 0, sizeof(float), stream_of(ctx_)),
        "cudaMemsetAsync");
  }
}

void CodesOutputs::write_codes() const {
  if (scale_count_ == 0) return;
  Scales scales;
  scales.count = scale_count_;
  std::copy_n(scales_, scale_count_, scales.of);
  scales_kernel<<<1, 1, 0, stream_of(ctx_)>>>(scales);
  check_launch("scales_kernel");
  for (int i = 0; i < staged_count_; ++i) {
    if (staged_[i].count == 0) continue;
    staged_codes_kernel<<<blocks_for(staged_[i].count), kThreads, 0, stream_of(ctx_)>>>(staged_[i]);
    check_launch("staged_codes_kernel");
  }
}

}  // namespace te_fl::cuda
