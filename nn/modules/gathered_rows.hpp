#pragma once

#include <array>
#include <functional>
#include <memory>

#include "nn/fp8/autocast.hpp"
#include "nn/fp8/fp8_state.hpp"
#include "te_fl/nn/modules/sequence_ranks.hpp"

// Operands of matrix products whose rows are sharded over the ranks of sequence parallelism.
namespace te_fl::nn::detail {

// True if FP8 data can be gathered instead of values. The gathered data of the ranks' parts [rows,
// ..] then equal those of the whole bit for bit. The result is the same on all ranks.
bool gathers_codes(const SequenceRanks& ranks, const Fp8Mode& mode, Role role, int64_t rows);

// Quantises `x` [rows, n] row-wise by current scaling, with the amax of all ranks' rows. Runs a
// collective on one number.
Result<Tensor> quantised_part(SequenceRanks& ranks, const Float8CurrentScaling& recipe, Role role,
                              const Tensor& x);

// True if a product with the ranks' parts is computed piece by piece; `part` is this rank's.
// Requires unquantised or per-tensor scaled operands, whose row slices are tensors.
bool in_pieces(const SequenceRanks& ranks, const Tensor& part);

// Rows [begin, begin + count) of an unquantised or per-tensor scaled tensor, without the
// column-wise copy.
Result<Tensor> piece_of(const Tensor& x, int64_t begin, int64_t count);

// A gather of the ranks' parts that is in progress. The destructor waits for its collectives.
class RowGather {
 public:
  // Starts the gather. `part` [rows, n]: unquantised; or per-tensor scaled, with a row-wise copy;
  // or scaled in 1x128 blocks, of which one copy is gathered. `copies`: the copies that
  // take_whole() returns. `now`: take_whole() follows immediately.
  static Result<RowGather> begin(SequenceRanks& ranks, const Tensor& part, Copies copies,
                                 bool now = false);
  // Waits and returns the whole [size * rows, n]. May be called once.
  Result<Tensor> take_whole();
  // For products in pieces: this rank's part, and the whole. The other ranks' rows of the whole are
  // valid after arrive(); it has no column-wise copy.
  const Tensor& part() const noexcept { return begun_->part; }
  const Tensor& whole() const noexcept { return begun_->whole; }
  int rank() const noexcept { return begun_->rank; }
  Status arrive();

 private:
  struct Array {
    Tensor from, gathered;
    Tensor to;  // defined: [n, size * k], assembled from `gathered` [size, n, k]
    std::unique_ptr<SequenceRanks::Work> work;
  };
  // A separately allocated object, since moving eight tensors costs more than one allocation.
  struct Begun {
    // Gathers one array of the part into the corresponding array of the whole. `side_by_side`: the
    // parts are placed next to each other instead of one after the other.
    Status add(SequenceRanks& ranks, const Tensor& from, const Tensor& to, bool side_by_side,
               bool now);

    Tensor part, whole;
    Copies copies;
    std::array<Array, 2> arrays;
    int count = 0, size = 1, rank = 0;
  };
  std::unique_ptr<Begun> begun_;
};

// Gathers at once: begin() and take_whole().
Result<Tensor> gather_rows_now(SequenceRanks& ranks, const Tensor& part, Copies copies = {});

// Reduce-scatter: this rank's rows of the sum of the ranks' `whole`.
Result<Tensor> scatter_rows_now(SequenceRanks& ranks, const Tensor& whole);

// A reduce-scatter that is in progress.
struct RowScatter {
  Tensor whole, part;
  std::unique_ptr<SequenceRanks::Work> work;
  static Result<RowScatter> begin(SequenceRanks& ranks, Tensor whole);
  // Starts the reduce-scatter of each piece of rows as soon as `product` has written it. `product`
  // receives the first row and the number of rows.
  static Result<RowScatter> in_pieces(SequenceRanks& ranks, Tensor whole,
                                      const std::function<Status(int64_t, int64_t)>& product);
  // Waits and returns this rank's rows of the sum. May be called once.
  Result<Tensor> take_part();
};

}  // namespace te_fl::nn::detail
