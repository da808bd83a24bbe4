#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "te_fl/comm.hpp"
#include "te_fl/device.hpp"
#include "te_fl/nn/modules/sequence_ranks.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn::detail {

// Collectives of a communicator on the calling thread's stream.
Status all_gather(const Comm& ranks, const Tensor& from, const Tensor& to);
Status all_reduce(const Comm& ranks, const Tensor& data, int32_t reduction = 0);
Status reduce_scatter(const Comm& ranks, const Tensor& whole, const Tensor& part);

// A second stream and the events that synchronise it with the caller's stream. Thread-safe.
class SideStream {
 public:
  // Null for a device without streams.
  static Result<std::shared_ptr<SideStream>> create(const Device& device);
  // Runs `call` on the side stream after the current stream's work. Returns an event recorded after
  // it.
  template <class F>
  Result<Event> run(F&& call) {
    TE_FL_ASSIGN_OR_RETURN(Event event, take_event());
    TE_FL_RETURN_IF_ERROR(event.record(devices::current_stream(stream_.device())));
    TE_FL_RETURN_IF_ERROR(stream_.wait(event));
    const StreamScope scope(stream_);
    TE_FL_RETURN_IF_ERROR(call());
    TE_FL_RETURN_IF_ERROR(event.record(stream_.get()));
    return event;
  }
  // Makes the current stream wait for the event. The event is then reused.
  Status join(Event event);

 private:
  explicit SideStream(Stream stream) : stream_(std::move(stream)) {}
  Result<Event> take_event();

  Stream stream_;
  std::mutex mutex_;
  std::vector<Event> idle_;
};

// The ranks of a communicator. Its collectives are enqueued on the stream before the functions
// return.
class CommRanks final : public SequenceRanks {
 public:
  explicit CommRanks(std::shared_ptr<const Comm> ranks) : ranks_(std::move(ranks)) {}
  int size() const noexcept override { return ranks_->size(); }
  int rank() const noexcept override { return ranks_->rank(); }
  Begun all_gather(const Tensor& part, const Tensor& whole, bool now) override;
  Begun reduce_scatter(const Tensor& whole, const Tensor& part, bool now) override;
  Begun reduce_scatter_beside(const Tensor& whole, const Tensor& part) override;
  Status sum(const Tensor& values) override;
  Status largest(const Tensor& values) override;
  bool share_amaxes(const AmaxReduction* reduction) const noexcept override;

 private:
  std::shared_ptr<const Comm> ranks_;
  std::shared_ptr<SideStream> side_;  // created on first use; not concurrently
  bool looked_for_side_ = false;
};

}  // namespace te_fl::nn::detail
