#include "nn/optim/gradient_buckets.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <utility>

#include "nn/autograd/parameter.hpp"
#include "nn/base/tensor_ops.hpp"

namespace te_fl::nn::detail {
namespace {

constexpr int64_t kAlignment = 64;  // in elements; aligns each gradient like an allocation

int64_t rounded(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }
int64_t padded(const Parameter& parameter) { return rounded(parameter.value.numel(), kAlignment); }

int64_t count_elements(std::span<const int64_t> shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// True if both parameters may share a bucket. With ZeRO their values are contiguous too, so their
// dtypes must be equal.
bool goes_with(const NamedParameter& a, const NamedParameter& b, bool zero) {
  return a.parameter->grad_dtype == b.parameter->grad_dtype &&
         a.value().device() == b.value().device() &&
         (!zero || a.value().dtype() == b.value().dtype());
}

Status check_movable(const NamedParameter& p) {
  TE_FL_RETURN_IF_ERROR(check_writable("DataParallel", p.name, *p.parameter));
  if (!p.parameter->internals().owners_version.has_value()) return {};
  return failed_precondition("DataParallel: the value of " + p.name +
                             " is borrowed (Parameter::borrow()), and ZeRO keeps the values in "
                             "flat memory of its own; leave DataParallelOptions::zero out");
}

}  // namespace

Result<Tensor> shaped(const Tensor& flat, int64_t begin, std::span<const int64_t> shape) {
  TE_FL_ASSIGN_OR_RETURN(const Tensor slice, flat.slice(0, begin, begin + count_elements(shape)));
  return slice.view(shape);
}

Result<std::shared_ptr<GradientBuckets>> GradientBuckets::create(
    const std::vector<NamedParameter>& parameters, std::shared_ptr<const Comm> ranks,
    int64_t bucket_bytes, bool zero, std::optional<bool> overlap) {
  std::shared_ptr<GradientBuckets> result(new GradientBuckets(std::move(ranks), zero));
  // Partial gradients, which have to be summed over ranks, are complete only after
  // sum_partial_gradients(), which runs after the backward pass. Their buckets come first, since
  // buckets are reduced from the last to the first.
  std::vector<NamedParameter> partial, finished;
  for (const NamedParameter& p : parameters) {
    if (!p.parameter->requires_grad) continue;
    if (zero) TE_FL_RETURN_IF_ERROR(check_movable(p));
    (p.parameter->partial_grad ? partial : finished).push_back(p);
  }
  TE_FL_RETURN_IF_ERROR(result->add_buckets(partial, bucket_bytes));
  const size_t held = result->buckets_.size();
  TE_FL_RETURN_IF_ERROR(result->add_buckets(finished, bucket_bytes));
  std::vector<size_t> bucket_of;
  for (const Member& member : result->members_) bucket_of.push_back(member.bucket);
  result->schedule_ =
      std::make_unique<BucketSchedule>(std::move(bucket_of), result->buckets_.size(), held);
  TE_FL_RETURN_IF_ERROR(result->use_streams(overlap));
  for (size_t i = 0; i < result->members_.size(); ++i) {
    ParameterState& state = result->members_[i].parameter.parameter->internals();
    state.listener = result.get();
    state.listeners_number = i;
    state.grad_divided = zero;
  }
  return result;
}

GradientBuckets::~GradientBuckets() {
  for (const Member& member : members_) {
    ParameterState& state = member.parameter.parameter->internals();
    if (state.listener != this) continue;
    state.listener = nullptr;
    state.grad_divided = false;
  }
}

Status GradientBuckets::add_buckets(const std::vector<NamedParameter>& parameters, int64_t most) {
  std::vector<NamedParameter> bucket;
  int64_t bytes = 0;
  for (const NamedParameter& p : parameters) {
    const int64_t own = bytes_for(p.parameter->grad_dtype, padded(*p.parameter));
    if (!bucket.empty() && (bytes + own > most || !goes_with(bucket.front(), p, zero_))) {
      TE_FL_RETURN_IF_ERROR(add_bucket(std::exchange(bucket, {})));
      bytes = 0;
    }
    bucket.push_back(p);
    bytes += own;
  }
  return bucket.empty() ? Status() : add_bucket(bucket);
}

Status GradientBuckets::add_bucket(const std::vector<NamedParameter>& parameters) {
  int64_t total = 0;
  for (const NamedParameter& p : parameters) total += padded(*p.parameter);
  if (zero_) total = rounded(total, kAlignment * ranks_->size());
  const NamedParameter& like = parameters.front();
  Bucket bucket;
  bucket.codes = like.value().quantized();
  TE_FL_ASSIGN_OR_RETURN(bucket.grads,
                         Tensor::zeros({total}, like.parameter->grad_dtype, like.value().device()));
  if (zero_ && !bucket.codes) {
    TE_FL_ASSIGN_OR_RETURN(bucket.values,
                           Tensor::zeros({total}, like.value().dtype(), like.value().device()));
  }
  int64_t begin = 0;
  for (const NamedParameter& p : parameters) {
    TE_FL_RETURN_IF_ERROR(add_member(bucket, p, begin).wrap(p.name));
    begin += padded(*p.parameter);
  }
  buckets_.push_back(std::move(bucket));
  return {};
}

Status GradientBuckets::add_member(Bucket& bucket, const NamedParameter& p, int64_t begin) {
  Member member{p, buckets_.size(), begin, nullptr, nullptr, {}};
  TE_FL_ASSIGN_OR_RETURN(Tensor grad, shaped(bucket.grads, begin, p.value().shape()));
  member.grad = grad.raw_data();
  TE_FL_RETURN_IF_ERROR(p.parameter->give_grad(std::move(grad), true));
  if (bucket.values.defined()) {
    TE_FL_ASSIGN_OR_RETURN(Tensor value, shaped(bucket.values, begin, p.value().shape()));
    TE_FL_RETURN_IF_ERROR(copy(p.value(), value));
    p.parameter->value = std::move(value);
    member.value = p.value().raw_data();
  }
  if (zero_) TE_FL_RETURN_IF_ERROR(find_own(member, bucket));
  bucket.members.push_back(members_.size());
  members_.push_back(std::move(member));
  return {};
}

Status GradientBuckets::find_own(Member& member, const Bucket& bucket) {
  const int64_t part = bucket.grads.numel() / ranks_->size();
  const int64_t first = ranks_->rank() * part;  // offset of this rank's part in the bucket
  const int64_t count = member.parameter.value().numel();
  OwnPart& own = member.own;
  own.begin = std::clamp<int64_t>(first - member.begin, 0, count);
  own.end = std::clamp<int64_t>(first + part - member.begin, 0, count);
  if (own.empty()) return {};
  const int64_t begin = member.begin + own.begin, end = member.begin + own.end;
  TE_FL_ASSIGN_OR_RETURN(own.grad, bucket.grads.slice(0, begin, end));
  if (bucket.values.defined()) {
    TE_FL_ASSIGN_OR_RETURN(own.value, bucket.values.slice(0, begin, end));
  }
  return {};
}

Status GradientBuckets::use_streams(std::optional<bool> overlap) {
  if (buckets_.empty()) return {};
  const Device device = buckets_.front().grads.device();
  const auto there = [&](const Bucket& bucket) { return bucket.grads.device() == device; };
  if (device.is_host() || !std::ranges::all_of(buckets_, there)) {
    overlap_ = overlap.value_or(false);
    return {};
  }
  if (!overlap.value_or(true)) return {};
  Result<Stream> side = Stream::create(device);
  if (side.status().code() == StatusCode::kUnsupported) {
    overlap_ = overlap.value_or(false);
    return {};
  }
  TE_FL_ASSIGN_OR_RETURN(side_, std::move(side));
  TE_FL_ASSIGN_OR_RETURN(ready_, Event::create(device));
  TE_FL_ASSIGN_OR_RETURN(done_, Event::create(device));
  overlap_ = true;
  return {};
}

Result<Tensor> GradientBuckets::find_own_part(const Tensor& flat) const {
  const int64_t part = flat.numel() / ranks_->size();
  return flat.slice(0, ranks_->rank() * part, (ranks_->rank() + 1) * part);
}

Status GradientBuckets::check(const Bucket& bucket) const {
  for (const size_t i : bucket.members) {
    const Member& member = members_[i];
    const NamedParameter& p = member.parameter;
    TE_FL_RETURN_IF_ERROR(check_complete("DataParallel", p));
    const std::string who = "DataParallel: the gradient of " + p.name;
    if (p.grad().raw_data() != member.grad) {
      return failed_precondition(who +
                                 " is not in its bucket any more: it was taken, replaced or "
                                 "dropped; create another DataParallel after that");
    }
    if (p.parameter->internals().grad_stale) {
      return failed_precondition(who +
                                 " was cleared by clear_grad() and not written since; use "
                                 "Module::zero_grad(), which makes it zero");
    }
    if (member.value == nullptr || p.value().raw_data() == member.value) continue;
    return failed_precondition("DataParallel: the value of " + p.name +
                               " is not in its bucket any more: another was put in its place; "
                               "create another DataParallel after that");
  }
  return {};
}

Status GradientBuckets::reduce(const Bucket& bucket) const {
  const CallOptions options = call_options(bucket.grads.device());
  if (!zero_) {
    te_fl_all_reduce_args args{};
    args.input = bucket.grads;
    args.output = bucket.grads;
    args.comm = ranks_->c();
    args.reduction = TE_FL_REDUCTION_AVG;
    return ops::all_reduce(args, options);
  }
  TE_FL_ASSIGN_OR_RETURN(const Tensor own, find_own_part(bucket.grads));
  te_fl_reduce_scatter_args args{};
  args.input = bucket.grads;
  args.output = own;
  args.comm = ranks_->c();
  args.reduction = TE_FL_REDUCTION_AVG;
  return ops::reduce_scatter(args, options);
}

Status GradientBuckets::average() {
  if (open_) {
    return failed_precondition(
        "DataParallel::average_gradients: a LastBackward is alive; let it end with the backward");
  }
  if (Status failed = std::exchange(failure_, Status()); !failed) return failed;
  if (averaged_ && zero_) {
    return failed_precondition(
        "DataParallel::average_gradients: the gradients have been averaged and neither written nor "
        "cleared since; with ZeRO another average would be that of other ranks' parts");
  }
  for (const Bucket& bucket : buckets_) TE_FL_RETURN_IF_ERROR(check(bucket));
  while (const std::optional<size_t> next = schedule_->take()) {
    TE_FL_RETURN_IF_ERROR(reduce(buckets_[*next]));
  }
  schedule_->end();
  averaged_ = true;
  return {};
}

void GradientBuckets::fail(Status status) {
  if (failure_) failure_ = std::move(status);
}

void GradientBuckets::open() {
  if (open_) {
    fail(failed_precondition("DataParallel::last_backward: another LastBackward is alive"));
    return;
  }
  open_ = true;
  schedule_->begin();
  if (!buckets_.empty()) backwards_ = devices::current_stream(buckets_.front().grads.device());
}

void GradientBuckets::close() {
  open_ = false;
  if (!std::exchange(on_side_, false)) return;
  const Device& device = side_.device();
  Status joined = done_.record(side_.get());
  if (joined) joined = devices::wait_event(device, done_.get(), backwards_);
  if (!joined) fail(std::move(joined));
}

Status GradientBuckets::start_early(const Bucket& bucket) {
  TE_FL_RETURN_IF_ERROR(check(bucket));
  if (side_.get() == nullptr) return reduce(bucket);
  TE_FL_RETURN_IF_ERROR(ready_.record(backwards_));
  TE_FL_RETURN_IF_ERROR(side_.wait(ready_));
  on_side_ = true;
  const StreamScope scope(side_);
  return reduce(bucket);
}

void GradientBuckets::wrote(size_t gradient) {
  averaged_ = false;
  if (schedule_->taken(gradient)) {
    fail(failed_precondition(
        "DataParallel: the gradient of " + members_[gradient].parameter.name +
        " was written after its collective had begun; last_backward() is for the last backward of "
        "a step alone, and for those that write each gradient as often as the first one did"));
    return;
  }
  if (!open_) return;
  schedule_->wrote(gradient);
  const Device device = buckets_.front().grads.device();
  if (!overlap_ || !failure_ || devices::current_stream(device) != backwards_) return;
  while (const std::optional<size_t> next = schedule_->take_complete()) {
    if (Status started = start_early(buckets_[*next]); !started) {
      fail(std::move(started));
      return;
    }
  }
}

void GradientBuckets::cleared() {
  if (!open_) schedule_->reset();
  failure_ = Status();
  averaged_ = false;
}

}  // namespace te_fl::nn::detail
