// Small kernels that run before and after cuDNN's attention. They compute sequence lengths and
// offsets from cu_seqlens, and they fill the rows of queries that see no key, which cuDNN leaves
// undefined.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "te_fl/attention/mask.hpp"

namespace te_fl::cuda {

// The cumulative sequence lengths (cu_seqlens) of the queries or of the keys. cu NULL: every
// sequence has `most` tokens.
struct SideLengths {
  const int32_t* cu = nullptr;
  const int32_t* padded = nullptr;
  int64_t stride = 0, padded_stride = 0;
  int64_t tokens = 0;  // thd: tokens of all sequences; else tokens of one sequence
  int64_t most = 0;    // the sequence length that the plan was made for
};
struct Spans {
  SideLengths q, kv;
  int64_t batch;
  bool ragged;
};

struct RaggedTensor {
  int64_t* offsets;
  int64_t stride;  // elements from one token to the next
  bool query;
};
constexpr int kMostRagged = 9;  // maximum number of tensors per call

struct LengthsJob {
  Spans spans;
  int32_t* q;
  int32_t* kv;
  RaggedTensor tensors[kMostRagged];
  int count;
};

// The rows of a tensor with 2-byte elements.
struct HeadRows {
  uint16_t* data;
  int64_t batch, head, seq;  // strides of the dimensions
  int64_t heads, seqlen, dim;
};
// The parameters of clear_rows(), which writes zeros to the rows that take no part in attention:
// queries that see no key, keys past a sequence's end, and keys of a sequence without queries. It
// also writes -inf to the `lse` of these rows unless `lse` is NULL.
struct ClearJob {
  Spans spans;
  backend::MaskRule mask;
  HeadRows rows;
  bool query;
  float* lse;
};

// Each function enqueues one kernel.
void write_lengths(cudaStream_t stream, const LengthsJob& job);
void clear_rows(cudaStream_t stream, const ClearJob& job);
// Copies the statistics for the backward. Rows without keys get +inf, so that their probabilities
// are exp(-inf) = 0 under every mask.
void copy_stats(cudaStream_t stream, const float* in, float* out, int64_t n);

}  // namespace te_fl::cuda
