#pragma once

#include <array>
#include <functional>
#include <memory>

#include "nn/fp8/autocast.hpp"
#include "nn/fp8/fp8_state.hpp"
#include "te_fl/nn/modules/sequence_ranks.hpp"

// Operands of matrix products whose rows are sharded over the ranks of sequence parallelism.
namespace te_fl::nn::detail {

// True if each rank can quantise its rows [rows, ..] and gather FP8 data instead of high-precision
// data. The gathered FP8 data are then bit for bit those of quantising the complete tensor. The
// result is the same on all ranks.
bool gathers_codes(const SequenceRanks& ranks, const Fp8Mode& mode, Role role, int64_t rows);

// Quantises `x` [rows, n] row-wise by current scaling, with the amax of all ranks' rows. Runs a
// collective on one number.
Result<Tensor> quantised_part(SequenceRanks& ranks, const Float8CurrentScaling& recipe, Role role,
                              const Tensor& x);

// True if a GEMM on the rows of all ranks is computed rank by rank while the rows arrive; `part`
// has this rank's rows. Requires unquantised or per-tensor scaled operands, since only these can be
// sliced by rows.
bool in_chunks(const SequenceRanks& ranks, const Tensor& part);

// Rows [begin, begin + count) of an unquantised or per-tensor scaled tensor, without column-wise
// data.
Result<Tensor> take_rows(const Tensor& x, int64_t begin, int64_t count);

// A gather of the ranks' parts that is in progress. The destructor waits for its collectives.
class RowGather {
 public:
  // Starts the gather. `part` [rows, n] is unquantised, or per-tensor scaled with row-wise data, or
  // scaled in 1x128 blocks with either row-wise or column-wise data to gather. `copies`: the
  // row-wise and column-wise data that take_whole() returns. `now`: take_whole() follows
  // immediately.
  static Result<RowGather> begin(SequenceRanks& ranks, const Tensor& part, Copies copies,
                                 bool now = false);
  // Waits and returns the gathered tensor [size * rows, n]. May be called once.
  Result<Tensor> take_whole();
  // For GEMMs that are computed rank by rank: this rank's rows, and the gathered tensor. The other
  // ranks' rows of the gathered tensor are valid after arrive(); it has no column-wise data.
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
    // Gathers one array of the part into the corresponding array of the gathered tensor.
    // `side_by_side`: the ranks' arrays are concatenated along the columns instead of the rows.
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

// Reduce-scatter: returns this rank's rows of the sum of all ranks' `whole`.
Result<Tensor> scatter_rows_now(SequenceRanks& ranks, const Tensor& whole);

// A reduce-scatter that is in progress.
struct RowScatter {
  Tensor whole, part;
  std::unique_ptr<SequenceRanks::Work> work;
  static Result<RowScatter> begin(SequenceRanks& ranks, Tensor whole);
  // Starts the reduce-scatter of each range of rows as soon as `product` has written it.
  // product(first row, number of rows) computes one range.
  static Result<RowScatter> in_chunks(SequenceRanks& ranks, Tensor whole,
                                      const std::function<Status(int64_t, int64_t)>& product);
  // Waits and returns this rank's rows of the sum. May be called once.
  Result<Tensor> take_part();
};

}  // namespace te_fl::nn::detail
