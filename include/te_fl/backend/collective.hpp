#pragma once

// Helpers for providers of collectives (R29): the checks of a call that all providers make in
// addition to the op's schema, and the size of the part that each rank sends and receives.
// Header-only.
//
//   desc.supports = te_fl::backend::supports_thunk<te_fl_all_gather_args,
//                                                  te_fl::backend::check_collective<te_fl_all_gather_args>>;

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "te_fl/backend.hpp"
#include "te_fl/ops/collective.h"
#include "te_fl/ops/moe.h"
#include "te_fl/plugin.h"

namespace te_fl::backend {

// The provider's own object, which its create() or split() returned for the communicator.
template <class T>
T& communicator(const te_fl_communicator* comm) noexcept {
  return *static_cast<T*>(comm->self);
}

// Size of a tensor's elements in bytes. Elements of less than a byte are packed, and the last byte
// counts in full.
inline int64_t bytes_of(const te_fl_tensor& t) noexcept {
  const int64_t count = numel(t), bits = t.dl.dtype.bits;
  return count / 8 * bits + (count % 8 * bits + 7) / 8;  // avoids a product that may overflow
}

namespace detail {

inline void need_compact(const char* name, const te_fl_tensor& t) {
  if (is_contiguous(t)) return;
  invalid(std::string("argument '") + name +
          "' is not compact, and must be: a collective takes memory as it lies; copy it first "
          "(strided_copy)");
}

inline void need_rank(const char* name, int32_t rank, const te_fl_communicator& comm) {
  if (rank < comm.size) return;
  invalid(std::string("argument '") + name + "' is rank " + std::to_string(rank) +
          " of a communicator of " + std::to_string(comm.size) + ", must be less");
}

inline void need_peer(int32_t peer, const te_fl_communicator& comm) {
  need_rank("peer", peer, comm);
  if (peer == comm.rank) {
    invalid("argument 'peer' is " + std::to_string(peer) +
            ", this very rank, which sends itself nothing; copy the tensor");
  }
}

inline bool apart(const te_fl_tensor& a, const te_fl_tensor& b) noexcept {
  const auto* x = data<const char>(a);
  const auto* y = data<const char>(b);
  return bytes_of(a) == 0 || bytes_of(b) == 0 || x + bytes_of(a) <= y || y + bytes_of(b) <= x;
}

inline void need_apart(const te_fl_tensor& input, const te_fl_tensor& output) {
  if (apart(input, output)) return;
  invalid("argument 'output' shares memory with 'input', and this collective is not done in place");
}

// Checks that `part`, a rank's tensor, either does not overlap `whole`, or is exactly the section
// of `whole` that belongs to `rank`.
inline void need_own_part(const char* name, const te_fl_tensor& part, const te_fl_tensor& whole,
                          int32_t rank) {
  if (apart(part, whole)) return;
  if (data<const char>(part) == data<const char>(whole) + rank * bytes_of(part)) return;
  invalid(std::string("argument '") + name +
          "' shares memory with the other tensor without being part " + std::to_string(rank) +
          " of it, which it is when this collective is done in place");
}

inline void need_whole_bytes(const char* name, const te_fl_tensor& t, int64_t elements) {
  if (elements % 8 * t.dl.dtype.bits % 8 == 0) return;
  invalid(std::string("argument '") + name + "' has parts of " + std::to_string(elements) +
          " elements of " + std::to_string(t.dl.dtype.bits) +
          " bits, which do not fill whole bytes; pad it");
}

inline void need_rows(const char* name, const char* tensor, const int64_t* rows, int64_t count,
                      const te_fl_tensor& t, const te_fl_communicator& comm) {
  const std::string which = std::string("argument '") + name + "' ";
  if (count != comm.size) {
    invalid(which + "is a list of " + std::to_string(count) +
            ", must have one number for each of " + std::to_string(comm.size) + " ranks");
  }
  int64_t sum = 0;
  for (int64_t r = 0; r < count; ++r) sum += rows[r];
  const int64_t extent = t.dl.ndim == 0 ? 1 : t.dl.shape[0];
  if (sum != extent) {
    invalid(which + "sums to " + std::to_string(sum) + ", must be the first extent of '" + tensor +
            "', which is " + std::to_string(extent));
  }
}

inline int64_t row_elements(const te_fl_tensor& t) noexcept {
  int64_t n = 1;
  for (int i = 1; i < t.dl.ndim; ++i) n *= t.dl.shape[i];
  return n;
}

// Checks one tensor of moe_dispatch and moe_combine with its output.
inline void need_rows_to_move(const char* name, const te_fl_tensor& input, const char* out_name,
                              const te_fl_tensor& output) {
  need_compact(name, input);
  need_compact(out_name, output);
  if (!apart(input, output)) {
    invalid(std::string("argument '") + out_name + "' shares memory with '" + name +
            "', and this collective is not done in place");
  }
  need_whole_bytes(name, input, row_elements(input));
}

inline void need_experts(const te_fl_moe_transfer_args& a) {
  const int64_t experts = a.input_rows_count, ranks = a.comm->size;
  if (experts != a.output_rows_count || experts % ranks != 0) {
    invalid("arguments 'input_rows' and 'output_rows' have " + std::to_string(experts) + " and " +
            std::to_string(a.output_rows_count) + " numbers, must have one for each expert, and " +
            std::to_string(ranks) + " ranks must have equally many experts");
  }
  for (int64_t e = a.comm->rank * (experts / ranks); e < (a.comm->rank + 1) * (experts / ranks);
       ++e) {
    if (a.input_rows[e] == a.output_rows[e]) continue;
    invalid("element " + std::to_string(e) + " of 'output_rows' is " +
            std::to_string(a.output_rows[e]) + ", of 'input_rows' " +
            std::to_string(a.input_rows[e]) + "; what rank " + std::to_string(a.comm->rank) +
            ", this one, sends itself it receives");
  }
}

}  // namespace detail

namespace detail {

template <class Args>
void check_plain_collective(const Args& a) {
  if constexpr (requires { a.input; }) need_compact("input", *a.input);
  if constexpr (requires { a.output; }) need_compact("output", *a.output);
  if constexpr (requires { a.data; }) need_compact("data", *a.data);
  if constexpr (requires { a.root; }) need_rank("root", a.root, *a.comm);
  if constexpr (requires { a.peer; }) need_peer(a.peer, *a.comm);
  if constexpr (std::is_same_v<Args, te_fl_all_reduce_args>) {
    need_own_part("output", *a.output, *a.input, 0);
  }
  if constexpr (std::is_same_v<Args, te_fl_reduce_scatter_args>) {
    need_own_part("output", *a.output, *a.input, a.comm->rank);
  }
  if constexpr (std::is_same_v<Args, te_fl_all_gather_args>) {
    need_own_part("input", *a.input, *a.output, a.comm->rank);
    if (a.comm->size > 1) need_whole_bytes("input", *a.input, numel(*a.input));
  }
  if constexpr (std::is_same_v<Args, te_fl_all_to_all_args>) {
    need_apart(*a.input, *a.output);
    if (numel(*a.input) % a.comm->size != 0) {
      invalid("argument 'input' has " + std::to_string(numel(*a.input)) +
              " elements, which do not divide into " + std::to_string(a.comm->size) +
              " equal parts; pad it, or use all_to_all_v");
    }
    if (a.comm->size > 1) {
      need_whole_bytes("input", *a.input, numel(*a.input) / a.comm->size);
    }
  }
  if constexpr (std::is_same_v<Args, te_fl_all_to_all_v_args>) {
    need_apart(*a.input, *a.output);
    need_rows("input_rows", "input", a.input_rows, a.input_rows_count, *a.input, *a.comm);
    need_rows("output_rows", "output", a.output_rows, a.output_rows_count, *a.output, *a.comm);
    const int64_t row = row_elements(*a.input);
    if (row != row_elements(*a.output)) {
      invalid("argument 'output' has rows of " + std::to_string(row_elements(*a.output)) +
              " elements, those of 'input' have " + std::to_string(row));
    }
    need_whole_bytes("input", *a.input, row);
  }
}

}  // namespace detail

// Throws INVALID_ARGUMENT (clean) for a mistake that the op's schema cannot express. Reads metadata
// only.
template <class Args>
void check_collective(const te_fl_context&, const Args& a) {
  if constexpr (std::is_same_v<Args, te_fl_moe_transfer_args>) {
    detail::need_rows_to_move("input", *a.input, "output", *a.output);
    if (a.probs != nullptr) {
      detail::need_rows_to_move("probs", *a.probs, "output_probs", *a.output_probs);
    }
    if (a.scales != nullptr) {
      detail::need_rows_to_move("scales", *a.scales, "output_scales", *a.output_scales);
    }
    detail::need_experts(a);
  } else {
    detail::check_plain_collective(a);
  }
}

// Size in bytes of one row of all_to_all_v, moe_dispatch and moe_combine.
inline int64_t row_bytes(const te_fl_tensor& t) noexcept {
  const int64_t count = detail::row_elements(t), bits = t.dl.dtype.bits;
  return count / 8 * bits + count % 8 * bits / 8;
}

// One tensor of moe_dispatch or moe_combine, whose rows are moved.
struct MovedRows {
  const char* from;
  char* to;
  int64_t row_bytes;
};

// The tensors of a call that have rows to move: input, and probs and scales if they are given.
inline std::vector<MovedRows> moved_rows(const te_fl_moe_transfer_args& a) {
  std::vector<MovedRows> all;
  const auto append = [&](const te_fl_tensor* from, const te_fl_tensor* to) {
    if (from == nullptr) return;
    all.push_back({data<const char>(*from), data<char>(*to), row_bytes(*from)});
  };
  append(a.input, a.output);
  append(a.probs, a.output_probs);
  append(a.scales, a.output_scales);
  return all;
}

// For each rank r and each expert e of the receiving (or returning) rank, element r L + e is the
// number of the first of these rows in a tensor that is ordered by rank, then by expert.
inline std::vector<int64_t> begins_by_rank(const int64_t* rows, int64_t count) {
  std::vector<int64_t> begins;
  int64_t next = 0;
  for (int64_t i = 0; i < count; ++i) begins.push_back(next), next += rows[i];
  return begins;
}
// Returns these numbers for a tensor that is ordered by expert, then by rank.
inline std::vector<int64_t> begins_by_expert(const int64_t* rows, int64_t count, int64_t ranks) {
  std::vector<int64_t> begins(static_cast<size_t>(count));
  const int64_t experts = count / ranks;
  int64_t next = 0;
  for (int64_t e = 0; e < experts; ++e) {
    for (int64_t i = e; i < count; i += experts) {
      begins[static_cast<size_t>(i)] = next;
      next += rows[i];
    }
  }
  return begins;
}

}  // namespace te_fl::backend
