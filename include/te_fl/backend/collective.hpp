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

#include "te_fl/backend.hpp"
#include "te_fl/ops/collective.h"
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

}  // namespace detail

// Throws INVALID_ARGUMENT (clean) for a mistake that the op's schema cannot express. Reads metadata
// only.
template <class Args>
void check_collective(const te_fl_context&, const Args& a) {
  if constexpr (requires { a.input; }) detail::need_compact("input", *a.input);
  if constexpr (requires { a.output; }) detail::need_compact("output", *a.output);
  if constexpr (requires { a.data; }) detail::need_compact("data", *a.data);
  if constexpr (requires { a.root; }) detail::need_rank("root", a.root, *a.comm);
  if constexpr (requires { a.peer; }) detail::need_peer(a.peer, *a.comm);
  if constexpr (std::is_same_v<Args, te_fl_all_reduce_args>) {
    detail::need_own_part("output", *a.output, *a.input, 0);
  }
  if constexpr (std::is_same_v<Args, te_fl_reduce_scatter_args>) {
    detail::need_own_part("output", *a.output, *a.input, a.comm->rank);
  }
  if constexpr (std::is_same_v<Args, te_fl_all_gather_args>) {
    detail::need_own_part("input", *a.input, *a.output, a.comm->rank);
    if (a.comm->size > 1) detail::need_whole_bytes("input", *a.input, numel(*a.input));
  }
  if constexpr (std::is_same_v<Args, te_fl_all_to_all_args>) {
    detail::need_apart(*a.input, *a.output);
    if (numel(*a.input) % a.comm->size != 0) {
      invalid("argument 'input' has " + std::to_string(numel(*a.input)) +
              " elements, which do not divide into " + std::to_string(a.comm->size) +
              " equal parts; pad it, or use all_to_all_v");
    }
    if (a.comm->size > 1) {
      detail::need_whole_bytes("input", *a.input, numel(*a.input) / a.comm->size);
    }
  }
  if constexpr (std::is_same_v<Args, te_fl_all_to_all_v_args>) {
    detail::need_apart(*a.input, *a.output);
    detail::need_rows("input_rows", "input", a.input_rows, a.input_rows_count, *a.input, *a.comm);
    detail::need_rows("output_rows", "output", a.output_rows, a.output_rows_count, *a.output,
                      *a.comm);
    const int64_t row = detail::row_elements(*a.input);
    if (row != detail::row_elements(*a.output)) {
      invalid("argument 'output' has rows of " + std::to_string(detail::row_elements(*a.output)) +
              " elements, those of 'input' have " + std::to_string(row));
    }
    detail::need_whole_bytes("input", *a.input, row);
  }
}

// Size in bytes of one row of all_to_all_v.
inline int64_t row_bytes(const te_fl_tensor& t) noexcept {
  const int64_t count = detail::row_elements(t), bits = t.dl.dtype.bits;
  return count / 8 * bits + count % 8 * bits / 8;
}

}  // namespace te_fl::backend
