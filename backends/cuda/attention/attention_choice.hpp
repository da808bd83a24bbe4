// Chooses between the plugin's own attention kernels: those for Hopper's tensor cores, and the
// scalar kernels, which accept every call. The choice is a pure function of metadata, so tests run
// without a GPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "te_fl/attention/problem.hpp"
#include "te_fl/backend.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/ops/attention.h"

namespace te_fl::cuda {

// Returns why 16-byte copies and stores cannot access the rows of `t`, or nullptr if they can. The
// dimensions of `t` are as in te_fl/ops/attention.h; the last is the head dimension. Reads metadata
// only.
inline const char* refuse_rows(const te_fl_tensor& t) {
  const int last = t.dl.ndim - 1;
  if (t.dl.shape[last] > 1 && backend::stride(t, last) != 1) {
    return "the elements of a head are not contiguous";
  }
  for (int i = 0; i < last; ++i) {
    const int64_t stride = backend::stride(t, i);
    if (t.dl.shape[i] > 1 && (stride <= 0 || stride * t.dl.dtype.bits % 128 != 0)) {
      return "a stride is not a positive multiple of 16 bytes";
    }
  }
  if (reinterpret_cast<uintptr_t>(backend::data<const void>(t)) % 16 != 0) {
    return "a tensor is not aligned to 16 bytes";
  }
  return nullptr;
}

struct AttentionChoice {
  int head = 0;             // head size of the tensor-core kernel, 64 or 128; 0: scalar kernels
  const char* reason = "";  // reason of the choice; static text

  bool tensor_cores() const noexcept { return head != 0; }
  std::string text() const {
    const std::string t = head != 0 ? "hopper, heads of " + std::to_string(head) : "scalar";
    return t + ": " + reason;
  }
};

namespace attention_choice {

constexpr int kArchitecture = 90;  // compute capability, 10 * major + minor
constexpr int64_t kMostHead = 128;
constexpr int64_t kMostTokens = int64_t{1} << 30;

// `all`: every tensor of the call that has a head dimension.
template <class Args>
const char* refuse(int architecture, const Args& a,
                   std::initializer_list<const te_fl_tensor*> all) {
  if (architecture != kArchitecture) {
    return "the tensor-core kernels are for GPUs of compute capability 9.0 (Hopper)";
  }
  const int dtype = dtype_index(a.q->dl.dtype);
  if (dtype != TE_FL_BF16 && dtype != TE_FL_F16) return "the tensor-core kernels take BF16 and F16";
  for (const te_fl_tensor* t : all) {
    if (dtype_index(t->dl.dtype) != dtype) return "tensors of another dtype than q";
    const int last = t->dl.ndim - 1;
    if (t->dl.shape[last] > kMostHead) return "a head has more than 128 elements";
    if (t->dl.shape[last] % 8 != 0) return "a head's size is not a multiple of 8";
    for (int i = 0; i < last; ++i) {
      if (t->dl.shape[i] > kMostTokens) return "more than 2^30 tokens";
    }
    if (const char* why = refuse_rows(*t)) return why;
  }
  if (a.bias != nullptr && dtype_index(a.bias->dl.dtype) != dtype) {
    return "a bias of another dtype than q";
  }
  if (a.softcap > 0) {
    // The kernels compute softcap's slope from the score, so the score must contain nothing else.
    if (a.bias != nullptr || a.alibi_slopes != nullptr) return "softcap and a bias or ALiBi";
    // Within these limits the error of a score is up to 2^-22 of the cap.
    if (!(a.softcap >= 0x1p-8f && a.softcap <= 256)) return "softcap is not in [1/256, 256]";
    if (!(std::fabs(a.scale) <= 1e30f)) return "softcap and a scale beyond 1e30";
  }
  return nullptr;
}

template <class Args>
AttentionChoice choose(int architecture, const Args& a,
                       std::initializer_list<const te_fl_tensor*> all) {
  if (const char* why = refuse(architecture, a, all)) return {0, why};
  const int64_t widest = std::max(a.q->dl.shape[a.q->dl.ndim - 1], a.v->dl.shape[a.v->dl.ndim - 1]);
  if (widest > 64) return {128, "16-bit tensors on Hopper, a head has more than 64 elements"};
  return {64, "16-bit tensors on Hopper, heads of at most 64 elements"};
}

}  // namespace attention_choice

// `architecture`: 10 * major + minor of the GPU's compute capability. The call must have passed
// attention_problem().
inline AttentionChoice choose_attention(int architecture, const te_fl_fused_attn_fwd_args& a) {
  return attention_choice::choose(architecture, a, {a.q, a.k, a.v, a.o});
}
inline AttentionChoice choose_attention(int architecture, const te_fl_fused_attn_bwd_args& a) {
  return attention_choice::choose(architecture, a, {a.q, a.k, a.v, a.o, a.d_o, a.dq, a.dk, a.dv});
}

// ---- scratch of the tensor-core kernels

namespace flash {
constexpr int kFixed = 128;   // rows (queries or keys) that a thread block keeps
constexpr int kPassing = 64;  // rows (keys or queries) of one pipeline stage
}  // namespace flash

// Sizes in bytes, each a multiple of 256.
struct AttentionScratch {
  size_t hide = 0;             // bits of the mask tensor, by query; in a backward also by key
  size_t keep = 0;             // bits of dropout, by query and by key; 0: the kernels draw them
  size_t score_gradients = 0;  // 0: the dbias kernel, if needed, recomputes them

  size_t bytes() const noexcept { return hide + keep + score_gradients; }
};

namespace attention_choice {

constexpr size_t kBeyond = size_t{1} << 62;  // more than any device has
// Converts from FP64, because the product of large extents may overflow 64 bits.
inline size_t whole_bytes(double bytes) {
  return bytes < static_cast<double>(kBeyond) ? static_cast<size_t>(bytes) : kBeyond;
}
inline double tiles(int64_t n, int rows) {
  return static_cast<double>(n / rows + (n % rows != 0 ? 1 : 0));
}

}  // namespace attention_choice

// Returns the bytes of PairBits::by_query or by_key: one 8-byte word per `fixed` row (a query of
// by_query) and 64 `passing` rows (keys of by_query).
inline size_t pair_bits_bytes(int64_t matrices, int64_t fixed, int64_t passing) {
  using attention_choice::tiles;
  return attention_choice::whole_bytes(8.0 * flash::kFixed * static_cast<double>(matrices) *
                                       tiles(fixed, flash::kFixed) *
                                       tiles(passing, flash::kPassing));
}

// Returns the scratch of a forward: the mask's bits only. The scratch of a backward
// (backward_scratch()) also holds dropout's bits if the longest sequence lengths are known; its
// parameter `most` limits the bytes of data that could be recomputed instead.
inline AttentionScratch forward_scratch(const backend::AttentionProblem& p) {
  AttentionScratch s;
  if (p.attn_mask == nullptr) return s;
  const int64_t matrices = p.attn_mask->dl.shape[0] * p.attn_mask->dl.shape[1];
  s.hide = pair_bits_bytes(matrices, p.seqlen_q, p.seqlen_kv);
  return s;
}
inline AttentionScratch backward_scratch(const backend::AttentionProblem& p, bool dbias,
                                         size_t most) {
  using attention_choice::tiles;
  AttentionScratch s = forward_scratch(p);
  const int64_t q = p.seqlen_q, kv = p.seqlen_kv, matrices = p.batch * p.heads;
  if (p.attn_mask != nullptr) {
    s.hide += pair_bits_bytes(p.attn_mask->dl.shape[0] * p.attn_mask->dl.shape[1], kv, q);
  }
  if (p.dropout_p > 0) {
    const size_t bytes = pair_bits_bytes(matrices, q, kv) + pair_bits_bytes(matrices, kv, q);
    if (bytes <= most) s.keep = bytes;
  }
  if (dbias) {
    const double tile = 2.0 * flash::kFixed * flash::kPassing;
    const size_t bytes =
        attention_choice::whole_bytes(tile * static_cast<double>(matrices) *
                                      tiles(q, flash::kFixed) * tiles(kv, flash::kPassing));
    if (bytes <= most - s.keep) s.score_gradients = bytes;
  }
  return s;
}

}  // namespace te_fl::cuda
