#include "attention/cudnn_lengths.hpp"
#include "common/element.cuh"

namespace te_fl::cuda {
namespace {

// Computes a sequence's start and length. Clamps cu_seqlens that exceed the tensors, so that no
// access is out of bounds.
__device__ void span(const Spans& spans, const SideLengths& s, int64_t b, int64_t& begin,
                     int64_t& len) {
  begin = 0;
  len = s.most;
  if (s.cu == nullptr) return;
  const int64_t first = s.cu[b * s.stride];
  len = b < spans.batch ? s.cu[(b + 1) * s.stride] - first : 0;
  if (spans.ragged) begin = s.padded != nullptr ? s.padded[b * s.padded_stride] : first;
  if (begin < 0 || begin > s.tokens) begin = s.tokens;
  if (len > s.tokens - begin) len = s.tokens - begin;
  if (len > s.most) len = s.most;
  if (len < 0) len = 0;
}

__global__ void lengths_kernel(LengthsJob job) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t b = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; b <= job.spans.batch;
       b += step) {
    int64_t q_begin, q_len, kv_begin, kv_len;
    span(job.spans, job.spans.q, b, q_begin, q_len);
    span(job.spans, job.spans.kv, b, kv_begin, kv_len);
    if (b < job.spans.batch) {
      job.q[b] = static_cast<int32_t>(q_len);
      job.kv[b] = static_cast<int32_t>(kv_len);
    }
    for (int i = 0; i < job.count; ++i) {
      const RaggedTensor& t = job.tensors[i];
      t.offsets[b] = (t.query ? q_begin : kv_begin) * t.stride;
    }
  }
}

__global__ void clear_kernel(ClearJob job) {
  const HeadRows& r = job.rows;
  const int64_t n = job.spans.batch * r.heads * r.seqlen, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t at = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; at < n; at += step) {
    const int64_t i = at % r.seqlen, h = at / r.seqlen % r.heads, b = at / r.seqlen / r.heads;
    int64_t q_begin, q_len, kv_begin, kv_len;
    span(job.spans, job.spans.q, b, q_begin, q_len);
    span(job.spans, job.spans.kv, b, kv_begin, kv_len);
    // In layout thd, the tensors have no rows for positions past a sequence's end.
    if (job.spans.ragged && i >= (job.query ? q_len : kv_len)) continue;
    if (job.query ? !job.mask.keys(i, q_len, kv_len).empty() : i < kv_len && q_len > 0) continue;
    const int64_t row = (job.query ? q_begin : kv_begin) + i;
    uint16_t* out = r.data + b * r.batch + h * r.head + row * r.seq;
    for (int64_t d = 0; d < r.dim; ++d) out[d] = 0;
    if (job.lse != nullptr) job.lse[job.spans.ragged ? row * r.heads + h : at] = -INFINITY;
  }
}

__global__ void stats_kernel(const float* in, float* out, int64_t n) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += step) {
    out[i] = in[i] == -INFINITY ? INFINITY : in[i];
  }
}

}  // namespace

void write_lengths(cudaStream_t stream, const LengthsJob& job) {
  lengths_kernel<<<blocks_for(job.spans.batch + 1), kThreads, 0, stream>>>(job);
  check_launch("lengths_kernel");
}
void clear_rows(cudaStream_t stream, const ClearJob& job) {
  const int64_t n = job.spans.batch * job.rows.heads * job.rows.seqlen;
  clear_kernel<<<blocks_for(n), kThreads, 0, stream>>>(job);
  check_launch("clear_kernel");
}
void copy_stats(cudaStream_t stream, const float* in, float* out, int64_t n) {
  stats_kernel<<<blocks_for(n), kThreads, 0, stream>>>(in, out, n);
  check_launch("stats_kernel");
}

}  // namespace te_fl::cuda
