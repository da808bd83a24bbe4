#include "nn/modules/comm_ranks.hpp"

#include <utility>

#include "nn/base/tensor_ops.hpp"
#include "te_fl/nn/fp8/amax_reduction.hpp"

namespace te_fl::nn::detail {

Status all_gather(const Comm& ranks, const Tensor& from, const Tensor& to) {
  te_fl_all_gather_args args{};
  args.input = from;
  args.output = to;
  args.comm = ranks.c();
  return ops::all_gather(args, call_options(from.device()));
}

Status all_reduce(const Comm& ranks, const Tensor& data, int32_t reduction) {
  te_fl_all_reduce_args args{};
  args.reduction = reduction;
  args.input = data;
  args.output = data;
  args.comm = ranks.c();
  return ops::all_reduce(args, call_options(data.device()));
}

Status reduce_scatter(const Comm& ranks, const Tensor& whole, const Tensor& part) {
  te_fl_reduce_scatter_args args{};
  args.input = whole;
  args.output = part;
  args.comm = ranks.c();
  return ops::reduce_scatter(args, call_options(whole.device()));
}

namespace {

// A collective on the side stream. It does not own its tensors: RowScatter keeps them until wait().
class BesideWork final : public SequenceRanks::Work {
 public:
  BesideWork(std::shared_ptr<SideStream> side, Event event)
      : side_(std::move(side)), event_(std::move(event)) {}
  ~BesideWork() override {
    if (side_ != nullptr) (void)wait();  // an error has been returned by then
  }
  Status wait() override { return std::exchange(side_, nullptr)->join(std::move(event_)); }

 private:
  std::shared_ptr<SideStream> side_;  // null after the wait
  Event event_;
};

}  // namespace

Result<std::shared_ptr<SideStream>> SideStream::create(const Device& device) {
  if (device.is_host()) return std::shared_ptr<SideStream>();
  Result<Stream> stream = Stream::create(device);
  if (stream.status().code() == StatusCode::kUnsupported) return std::shared_ptr<SideStream>();
  TE_FL_RETURN_IF_ERROR(stream.status());
  return std::shared_ptr<SideStream>(new SideStream(*std::move(stream)));
}

Result<Event> SideStream::take_event() {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      Event event = std::move(idle_.back());
      idle_.pop_back();
      return event;
    }
  }
  return Event::create(stream_.device());
}

Status SideStream::join(Event event) {
  const Device& device = stream_.device();
  TE_FL_RETURN_IF_ERROR(devices::wait_event(device, event.get(), devices::current_stream(device)));
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(event));
  return {};
}

SequenceRanks::Begun CommRanks::all_gather(const Tensor& part, const Tensor& whole, bool) {
  TE_FL_RETURN_IF_ERROR(detail::all_gather(*ranks_, part, whole));
  return std::unique_ptr<Work>();
}

SequenceRanks::Begun CommRanks::reduce_scatter(const Tensor& whole, const Tensor& part, bool) {
  TE_FL_RETURN_IF_ERROR(detail::reduce_scatter(*ranks_, whole, part));
  return std::unique_ptr<Work>();
}

SequenceRanks::Begun CommRanks::reduce_scatter_beside(const Tensor& whole, const Tensor& part) {
  if (!std::exchange(looked_for_side_, true)) {
    TE_FL_ASSIGN_OR_RETURN(side_, SideStream::create(whole.device()));
  }
  if (side_ == nullptr) return reduce_scatter(whole, part, false);
  TE_FL_ASSIGN_OR_RETURN(Event done,
                         side_->run([&] { return detail::reduce_scatter(*ranks_, whole, part); }));
  return std::unique_ptr<Work>(new BesideWork(side_, std::move(done)));
}

Status CommRanks::sum(const Tensor& values) { return all_reduce(*ranks_, values); }

Status CommRanks::largest(const Tensor& values) {
  return all_reduce(*ranks_, values, TE_FL_REDUCTION_MAX);
}

bool CommRanks::share_amaxes(const AmaxReduction* reduction) const noexcept {
  return reduction != nullptr && reduction->is_over(*ranks_);
}

}  // namespace te_fl::nn::detail
