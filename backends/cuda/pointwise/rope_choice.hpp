// Divides the work of a launch of rotary position embedding: a pure function of metadata, so tests
// run without a GPU. The kernel is in rope_kernels.cuh; its work items are packs or pairs of
// elements.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "te_fl/backend.hpp"
#include "te_fl/ops/rope.h"

namespace te_fl::cuda {

// One kind of head of a token (Q, K or V). `table`: index of the angle table that rotates the
// head's first columns; -1: the head is copied.
struct RopeHeads {
  int64_t width = 0;
  int table = -1;
};
// A table of angles, [rows, columns].
struct RopeTable {
  const void* angles = nullptr;
  int64_t columns = 0, rows = 0;
};

struct RopeProblem {
  bool empty = false;    // the call has no elements
  bool aligned = false;  // every tensor is 16-byte aligned
  int64_t heads = 1;     // heads per token
  RopeHeads kinds[3];
  int kind_count = 1;
  RopeTable tables[2];
};

enum class RopeKernel { kNone, kPacks, kPairs };
constexpr const char* name_of(RopeKernel kernel) noexcept {
  constexpr const char* kNames[] = {"none", "packs", "pairs"};
  return kNames[static_cast<int>(kernel)];
}

struct RopeChoice {
  RopeKernel kernel = RopeKernel::kNone;
  bool shared = true;   // a block computes its tokens' angles once, in shared memory
  bool same = false;    // Q and K use the same table
  int64_t columns = 0;  // columns of both tables together
  int64_t tokens = 1;   // tokens per block
  int64_t items = 1;    // work items per head; a thread processes one item at once
  const char* reason = "";

  // Bytes of shared memory per block.
  int64_t shared_bytes() const noexcept {
    return shared ? tokens * columns * 2 * static_cast<int64_t>(sizeof(float)) : 0;
  }
  std::string text() const {
    if (kernel == RopeKernel::kNone) return std::string(name_of(kernel)) + ": " + reason;
    return std::string(name_of(kernel)) + ", a block has " + std::to_string(tokens) +
           (tokens == 1 ? " token" : " tokens") +
           (shared ? "" : " and no angles in shared memory") + ": " + reason;
  }
};

namespace rope_choice {

constexpr int64_t kPackElements = 8;  // equals kGroup of element.cuh
constexpr int64_t kBlockThreads = 256;
constexpr int64_t kMostTokens = 32;  // maximum tokens per block
constexpr int64_t kSharedLimit = 48 << 10;

inline bool aligned16(const te_fl_tensor& t) noexcept {
  return reinterpret_cast<uintptr_t>(backend::data<const void>(t)) % 16 == 0;
}
inline int64_t divided_up(int64_t a, int64_t b) noexcept { return (a + b - 1) / b; }
// Returns the extent of a dimension counted from the end (1 is the last); 1 if the dimension does
// not exist.
inline int64_t extent_from_end(const te_fl_tensor& t, int back) noexcept {
  return t.dl.ndim >= back ? t.dl.shape[t.dl.ndim - back] : 1;
}
inline RopeTable make_rope_table(const te_fl_tensor& freqs) noexcept {
  return {backend::data<const void>(freqs), extent_from_end(freqs, 1), extent_from_end(freqs, 4)};
}

// Number of tokens per block, at most `most`. Chosen so that every round gives each thread two
// items and few threads are idle in the last round.
inline int64_t tokens_of_block(int64_t items, int64_t most) noexcept {
  constexpr int64_t kRound = 2 * kBlockThreads;
  int64_t best = 1;
  double best_share = 0;
  for (int64_t each = 1; each <= most && (each == 1 || items * each <= 4 * kRound); ++each) {
    const auto busy = static_cast<double>(items * each);
    const double share = busy / static_cast<double>(divided_up(items * each, kRound) * kRound);
    if (share > best_share + 0.05) best = each, best_share = share;
  }
  return best;
}

inline int64_t columns_of(const RopeProblem& p, const RopeHeads& kind) noexcept {
  return kind.table < 0 ? 0 : p.tables[kind.table].columns;
}
// Returns why the kernel's items must be pairs of elements; nullptr if they can be packs of eight.
inline const char* refuse_packs(const RopeProblem& p, bool shared) noexcept {
  if (!p.aligned) return "a tensor is not aligned to 16 bytes";
  if (!shared) return "the angles of a token do not fit in 48 KiB";
  for (int i = 0; i < p.kind_count; ++i) {
    if (p.kinds[i].width % kPackElements != 0) return "heads of no multiple of 8 elements";
    if (columns_of(p, p.kinds[i]) % (2 * kPackElements) != 0) {
      return "angles of no multiple of 16 columns";
    }
  }
  return nullptr;
}

}  // namespace rope_choice

inline RopeProblem rope_problem(const te_fl_rope_rope_args& a) noexcept {
  using namespace rope_choice;
  RopeProblem p;
  p.empty = backend::numel(*a.input) == 0;
  p.aligned = aligned16(*a.input) && aligned16(*a.output);
  p.heads = extent_from_end(*a.input, 2);
  p.kinds[0] = {extent_from_end(*a.input, 1), 0};
  p.tables[0] = make_rope_table(*a.freqs);
  return p;
}
// Returns the problem of a call with packed Q, K and V in `whole`. Args: the argument struct of the
// packed forward or backward.
template <class Args>
RopeProblem rope_problem(const Args& a, const te_fl_tensor& whole, const te_fl_tensor& q,
                         const te_fl_tensor& k, const te_fl_tensor& v) noexcept {
  using namespace rope_choice;
  RopeProblem p;
  p.empty = backend::numel(whole) == 0;
  p.aligned = aligned16(whole) && aligned16(q) && aligned16(k) && aligned16(v);
  p.heads = extent_from_end(whole, 2) * (a.q_dim / std::max<int64_t>(a.k_dim, 1) + 2);
  p.kinds[0] = {a.k_dim, 0};
  p.kinds[1] = {a.k_dim, 1};
  p.kinds[2] = {a.v_dim, -1};
  p.kind_count = 3;
  p.tables[0] = make_rope_table(*a.q_freqs);
  p.tables[1] = make_rope_table(*a.k_freqs);
  return p;
}
inline RopeProblem rope_problem(const te_fl_fused_qkv_rope_forward_args& a) noexcept {
  return rope_problem(a, *a.qkv_input, *a.q_out, *a.k_out, *a.v_out);
}
inline RopeProblem rope_problem(const te_fl_fused_qkv_rope_backward_args& a) noexcept {
  return rope_problem(a, *a.qkv_grad, *a.q_grad, *a.k_grad, *a.v_grad);
}

inline RopeChoice choose_rope(const RopeProblem& p) noexcept {
  using namespace rope_choice;
  RopeChoice c;
  if (p.empty) {
    c.reason = "a tensor without elements";
    return c;
  }
  const RopeTable &q = p.tables[0], &k = p.tables[1];
  c.same = k.angles == q.angles && k.columns == q.columns && k.rows == q.rows;
  c.columns = q.columns + (c.same ? 0 : k.columns);
  const int64_t token_bytes = c.columns * 2 * static_cast<int64_t>(sizeof(float));
  c.shared = token_bytes <= kSharedLimit;
  const char* const refused = refuse_packs(p, c.shared);
  c.kernel = refused == nullptr ? RopeKernel::kPacks : RopeKernel::kPairs;
  c.reason = refused == nullptr ? "eight elements are read and written at once" : refused;
  for (int i = 0; i < p.kind_count; ++i) {
    const int64_t columns = columns_of(p, p.kinds[i]), rest = p.kinds[i].width - columns;
    const int64_t packs = columns / (2 * kPackElements) + divided_up(rest, 2 * kPackElements);
    c.items = std::max(c.items, refused == nullptr ? packs : columns / 2 + rest);
  }
  const int64_t most = c.shared && token_bytes > 0 ? kSharedLimit / token_bytes : kMostTokens;
  c.tokens = tokens_of_block(c.items * p.heads, std::min(most, kMostTokens));
  return c;
}

}  // namespace te_fl::cuda
