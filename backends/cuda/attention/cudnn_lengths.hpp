// The small kernels around cuDNN's attention: true lengths and starts from cu_seqlens, and what the
// library leaves undefined in rows that see no key.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "te_fl/attention/mask.hpp"

namespace te_fl::cuda {

// One side's prefix sums, absent where every sequence has `most` tokens.
struct SideLengths {
  const int32_t* cu = nullptr;
  const int32_t* padded = nullptr;
  int64_t stride = 0, padded_stride = 0;
  int64_t tokens = 0;  // thd: in all; else of a sequence
  int64_t most = 0;    // the extent that the plan was made for
};
struct Spans {
  SideLengths q, kv;
  int64_t batch;
  bool ragged;
};

struct RaggedTensor {
  int64_t* offsets;
  int64_t stride;  // of a token
  bool query;
};
constexpr int kMostRagged = 9;  // tensors of one call

struct LengthsJob {
  Spans spans;
  int32_t* q;
  int32_t* kv;
  RaggedTensor tensors[kMostRagged];
  int count;
};

// Rows of a tensor of 2-byte elements.
struct HeadRows {
  uint16_t* data;
  int64_t batch, head, seq;  // strides
  int64_t heads, seqlen, dim;
};
// Zeros in rows that the masks leave without a partner: queries that see no key, keys that are not
// there or whose sequence has no query. `lse`, if any, gets -inf there.
struct ClearJob {
  Spans spans;
  backend::MaskRule mask;
  HeadRows rows;
  bool query;
  float* lse;
};

// Each enqueues one kernel.
void write_lengths(cudaStream_t stream, const LengthsJob& job);
void clear_rows(cudaStream_t stream, const ClearJob& job);
// The statistics as the backward reads them: a row without keys has +inf, so that its
// probabilities are exp(-inf) whichever way they are masked.
void copy_stats(cudaStream_t stream, const float* in, float* out, int64_t n);

}  // namespace te_fl::cuda
