#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "te_fl/comm.hpp"
#include "te_fl/device.hpp"
#include "te_fl/export.hpp"
#include "te_fl/nn/autograd/tape.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn {

// Rows, and perhaps one number for each row (undefined: none).
struct RowsWithProbs {
  Tensor rows;   // [R, H]
  Tensor probs;  // [R]
};

// Interface to the ranks over which experts are divided, for a framework's process group. (A
// te_fl::Comm is used directly.) All ranks make the same calls in the same order, each ordered on
// the calling thread's current stream of the device.
class TE_FL_API ExpertRanks {
 public:
  ExpertRanks() = default;
  ExpertRanks(const ExpertRanks&) = delete;
  ExpertRanks& operator=(const ExpertRanks&) = delete;
  virtual ~ExpertRanks();
  virtual int size() const noexcept = 0;
  virtual int rank() const noexcept = 0;
  virtual Device device() const = 0;
  // The op all_to_all.
  virtual Status all_to_all(const Tensor& from, const Tensor& to) = 0;
  // The op moe_dispatch or moe_combine.
  virtual Status move_rows(bool dispatches, const RowsWithProbs& from, const RowsWithProbs& to,
                           std::span<const int64_t> sent, std::span<const int64_t> received) = 0;
};

// Rows that are on their way to other ranks. Movable. wait() returns the received rows, and the
// calling thread's stream waits for them; call it once, on the thread that began the transfer. On
// devices with streams the transfer runs on a stream of its own, beside what the caller enqueues
// before wait(); on the host it has ended when it is returned. If wait() is not called, the
// destructor waits for the device.
class TE_FL_API RowTransfer {
 public:
  RowTransfer() = default;
  RowTransfer(RowTransfer&& other) noexcept = default;
  RowTransfer& operator=(RowTransfer&& other) noexcept;
  ~RowTransfer();
  Result<RowsWithProbs> wait();

 private:
  friend class ExpertRoute;
  RowsWithProbs sent_, received_;
  Stream side_;
  Event done_;
  bool flies_ = false;
};

// The way of rows to the ranks that have their experts, and back (expert parallelism). Of E experts
// and n ranks, rank r has the experts [r E / n, (r + 1) E / n). combine() is the backward of
// dispatch(), and dispatch() that of combine(). All ranks make the same calls in the same order.
class TE_FL_API ExpertRoute {
 public:
  // Tells the other ranks the numbers of rows. Called by every rank. rows_of_experts: the number of
  // rows for each of the E experts. rows: [R, H], ordered by expert, the rows that are to be
  // dispatched; only its shape and dtype are read. INVALID_ARGUMENT on all ranks, before rows are
  // sent, if the numbers of any rank do not sum to its rows or are negative, if n does not divide
  // E, or if E, H or the dtype differ between ranks. Waits for the other ranks.
  static Result<ExpertRoute> create(std::shared_ptr<const Comm> ranks,
                                    std::span<const int64_t> rows_of_experts, const Tensor& rows);

  static Result<ExpertRoute> create(std::shared_ptr<ExpertRanks> ranks,
                                    std::span<const int64_t> rows_of_experts, const Tensor& rows);

  // The number of rows of each of this rank's experts after dispatch(): GroupedLinear's splits.
  const std::vector<int64_t>& splits() const noexcept { return splits_; }

  // [R, H] ordered by expert -> [sum of splits(), H] ordered by this rank's expert, then by the
  // rank that they come from. `probs` travels with the rows if it is defined.
  Result<RowsWithProbs> dispatch(const Tensor& rows, const Tensor& probs = {}) const;
  // The inverse: the experts' rows return to the ranks and places that they came from. The number
  // of columns may be another, the same on all ranks.
  Result<RowsWithProbs> combine(const Tensor& rows, const Tensor& probs = {}) const;
  Result<RowTransfer> start_dispatch(const Tensor& rows, const Tensor& probs = {}) const;
  Result<RowTransfer> start_combine(const Tensor& rows, const Tensor& probs = {}) const;

  // Versions for tape values.
  Value dispatch(const Value& rows) const;
  Value combine(const Value& rows) const;

 private:
  ExpertRoute() = default;
  Result<RowTransfer> start(bool dispatches, const Tensor& rows, const Tensor& probs,
                            bool beside) const;

  std::shared_ptr<ExpertRanks> ranks_;
  std::vector<int64_t> sent_, received_;  // numbers of rows by rank and its expert
  std::vector<int64_t> splits_;
};

}  // namespace te_fl::nn
