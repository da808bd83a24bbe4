// Functions of attention that read element data (sequence lengths, masks), for host memory only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "te_fl/attention/problem.hpp"

namespace te_fl::backend {

// Position and length of one sequence. With layout thd, q_begin and kv_begin are its first tokens;
// otherwise they are 0.
struct SequenceSpan {
  int64_t q_begin = 0;
  int64_t q_len = 0;
  int64_t kv_begin = 0;
  int64_t kv_len = 0;
};

namespace detail {

// Reads begin and length of sequence b, for the queries or for the keys, and checks them against
// `limit`: the number of tokens with layout thd, otherwise the positions per sequence.
inline void read_lengths(const char* name, const te_fl_tensor& cu, const te_fl_tensor* padded,
                         bool thd, int64_t limit, int64_t b, int64_t& begin, int64_t& len) {
  const auto at = [](const te_fl_tensor& t, int64_t i) -> int64_t {
    return data<const int32_t>(t)[i * stride(t, 0)];
  };
  const auto fail = [&](const std::string& rule) {
    invalid(std::string(name) + ": sequence " + std::to_string(b) + " has " + std::to_string(len) +
            (thd ? " tokens from " + std::to_string(begin) : std::string(" true positions")) +
            ", expected " + rule);
  };
  len = at(cu, b + 1) - at(cu, b);
  begin = !thd ? 0 : padded != nullptr ? at(*padded, b) : at(cu, b);
  if (len < 0) fail("prefix sums that do not decrease");
  if (begin < 0 || begin + len > limit) {
    fail("at most " + std::to_string(limit) + (thd ? " tokens in all" : " (the tensor's extent)"));
  }
  if (thd && padded != nullptr && begin + len > at(*padded, b + 1)) {
    fail("no more than the padded starts leave room for");
  }
}

}  // namespace detail

// The sequences of a call. Reads cu_seqlens_*. Throws if they do not fit the tensors or
// max_seqlen_*.
inline std::vector<SequenceSpan> host_sequences(const AttentionProblem& p) {
  std::vector<SequenceSpan> spans(static_cast<size_t>(p.batch), {0, p.seqlen_q, 0, p.seqlen_kv});
  if (!p.variable_length()) return spans;
  for (int64_t b = 0; b < p.batch; ++b) {
    SequenceSpan& s = spans[static_cast<size_t>(b)];
    detail::read_lengths("cu_seqlens_q", *p.cu_seqlens_q, p.cu_seqlens_q_padded, p.thd, p.q.seqlen,
                         b, s.q_begin, s.q_len);
    detail::read_lengths("cu_seqlens_kv", *p.cu_seqlens_kv, p.cu_seqlens_kv_padded, p.thd,
                         p.k.seqlen, b, s.kv_begin, s.kv_len);
    if ((p.thd && p.seqlen_q != 0 && s.q_len > p.seqlen_q) ||
        (p.thd && p.seqlen_kv != 0 && s.kv_len > p.seqlen_kv)) {
      invalid("sequence " + std::to_string(b) + " has " + std::to_string(s.q_len) +
              " queries and " + std::to_string(s.kv_len) +
              " keys, more than max_seqlen_q, max_seqlen_kv = " + std::to_string(p.seqlen_q) +
              ", " + std::to_string(p.seqlen_kv) +
              "; give the longest lengths, or 0 to take them from cu_seqlens");
    }
  }
  return spans;
}

// Extents Sq and Sk of the logical matrix [B, H, Sq, Sk]. The index of an element in this matrix
// selects the element's random number for dropout.
struct LogicalExtents {
  int64_t q = 0;
  int64_t kv = 0;
};
inline LogicalExtents logical_extents(const AttentionProblem& p,
                                      const std::vector<SequenceSpan>& spans) {
  LogicalExtents e{p.seqlen_q, p.seqlen_kv};
  if (!p.thd) return e;
  for (const SequenceSpan& s : spans) {
    if (p.seqlen_q == 0) e.q = std::max(e.q, s.q_len);
    if (p.seqlen_kv == 0) e.kv = std::max(e.kv, s.kv_len);
  }
  return e;
}

// True if query i of sequence b does not see key j in head h.
inline bool masked(const AttentionProblem& p, const SequenceSpan& s, int64_t b, int64_t h,
                   int64_t i, int64_t j) noexcept {
  if (p.mask.masked(i, j, s.q_len, s.kv_len)) return true;
  return p.mask.arbitrary &&
         data<const uint8_t>(*p.attn_mask)[broadcast_offset(*p.attn_mask, b, h, i, j)] != 0;
}

}  // namespace te_fl::backend
