#pragma once

#include <array>
#include <functional>
#include <memory>

#include "nn/fp8/autocast.hpp"
#include "nn/fp8/fp8_state.hpp"
#include "te_fl/nn/modules/sequence_ranks.hpp"

// Operands of products whose rows the ranks of sequence parallelism have parts of.
namespace te_fl::nn::detail {

// True if codes may travel in place of values: those of the ranks' parts [rows, ..] are then the
// codes of the whole, bit for bit. All ranks come to the same answer.
bool gathers_codes(const SequenceRanks& ranks, const Fp8Mode& mode, Role role, int64_t rows);

// `x` [rows, n] in row-wise codes with the scale of all ranks' rows; by current scaling. A
// collective of one number.
Result<Tensor> quantised_part(SequenceRanks& ranks, const Float8CurrentScaling& recipe, Role role,
                              const Tensor& x);

// True if a product of the ranks' parts, of which `part` is this rank's, is computed in pieces: of
// values or codes scaled by tensor, whose rows are tensors of their own.
bool in_pieces(const SequenceRanks& ranks, const Tensor& part);

// Rows [begin, begin + count) of values or of codes scaled by tensor, for a product that reads the
// row-wise copy.
Result<Tensor> piece_of(const Tensor& x, int64_t begin, int64_t count);

// A gather of the ranks' parts that has begun. Its collectives are over when this goes.
class RowGather {
 public:
  // The copies that take_whole() is to have; of values there is one.
  // part [rows, n]: values; codes scaled by tensor, which have row-wise ones at least; or codes
  // scaled by blocks of 1x128, of which `copies` takes one that the part has.
  // now: take_whole() follows at once.
  static Result<RowGather> begin(SequenceRanks& ranks, const Tensor& part, Copies copies,
                                 bool now = false);
  // The whole [size * rows, n]; waits. Once.
  Result<Tensor> take_whole();
  // This rank's part, and the whole, whose other rows are there after arrive(), but for a
  // column-wise copy: for products in pieces.
  const Tensor& part() const noexcept { return begun_->part; }
  const Tensor& whole() const noexcept { return begun_->whole; }
  int rank() const noexcept { return begun_->rank; }
  Status arrive();

 private:
  struct Array {
    Tensor from, gathered;
    Tensor to;  // defined: [n, size * k], to which the `gathered` [size, n, k] are put together
    std::unique_ptr<SequenceRanks::Work> work;
  };
  // In one piece, since eight tensors cost more to move than it to allocate.
  struct Begun {
    // Gathers one array of the part into one of the whole, whose first extents may be another
    // order.
    Status add(SequenceRanks& ranks, const Tensor& from, const Tensor& to, bool side_by_side,
               bool now);

    Tensor part, whole;
    Copies copies;
    std::array<Array, 2> arrays;
    int count = 0, size = 1, rank = 0;
  };
  std::unique_ptr<Begun> begun_;
};

// begin() and take_whole().
Result<Tensor> gather_rows_now(SequenceRanks& ranks, const Tensor& part, Copies copies = {});

// This rank's rows of the sum of the ranks' `whole`.
Result<Tensor> scatter_rows_now(SequenceRanks& ranks, const Tensor& whole);

// A reduce-scatter that has begun.
struct RowScatter {
  Tensor whole, part;
  std::unique_ptr<SequenceRanks::Work> work;
  static Result<RowScatter> begin(SequenceRanks& ranks, Tensor whole);
  // The rows of `whole` are written piece by piece by `product`, which is given the first row and
  // their count.
  static Result<RowScatter> in_pieces(SequenceRanks& ranks, Tensor whole,
                                      const std::function<Status(int64_t, int64_t)>& product);
  // This rank's rows of the sum; waits. Once.
  Result<Tensor> take_part();
};

}  // namespace te_fl::nn::detail
