#include "te_fl/nn/modules/expert_parallel.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "nn/base/tensor_ops.hpp"

namespace te_fl::nn {
namespace {

// Each rank sends each other rank a message of these fields and its numbers of rows for that rank's
// experts. More numbers than kHere follow in a second message, when the ranks are known to agree,
// so that the first message has the same size on all ranks whatever their arguments are.
enum Field : uint8_t { kExperts, kColumns, kDType, kRows, kSum, kLeast, kRefused, kFields };
constexpr int64_t kHere = 57;
constexpr int64_t kWidth = kFields + kHere;

// Exchanges a row of `width` integers with each rank.
Result<std::vector<int64_t>> exchange(ExpertRanks& ranks, const std::vector<int64_t>& values,
                                      int64_t width) {
  const std::array<int64_t, 2> shape = {ranks.size(), width};
  TE_FL_ASSIGN_OR_RETURN(Tensor from, Tensor::empty(shape, DType::kI64));
  std::ranges::copy(values, from.data<int64_t>());
  if (!ranks.device().is_host()) {
    TE_FL_ASSIGN_OR_RETURN(from, from.to(ranks.device()));
  }
  TE_FL_ASSIGN_OR_RETURN(const Tensor to, Tensor::empty(shape, DType::kI64, ranks.device()));
  TE_FL_RETURN_IF_ERROR(ranks.all_to_all(from, to));
  TE_FL_ASSIGN_OR_RETURN(const Tensor host, to.to(Device()));
  const auto* first = host.data<int64_t>();
  return std::vector<int64_t>(first, first + host.numel());
}

// Returns why the arguments of this rank are refused; empty if they are right.
std::string problem(const ExpertRanks& ranks, std::span<const int64_t> counts, const Tensor& rows) {
  if (!rows.defined() || rows.rank() != 2 || rows.quantized() || rows.device() != ranks.device()) {
    return "rows is " + (rows.defined() ? rows.describe() : std::string("undefined")) +
           "; it is an unquantised matrix on " + to_string(ranks.device());
  }
  if (counts.empty() || counts.size() % static_cast<size_t>(ranks.size()) != 0) {
    return "rows_of_experts has " + std::to_string(counts.size()) +
           " numbers; it has one for each expert, and " + std::to_string(ranks.size()) +
           " ranks have equally many experts";
  }
  return "";
}

// Returns why the ranks' messages do not fit together; empty if they do.
std::string disagreement(const std::vector<int64_t>& messages, int ranks) {
  const auto field = [&](int rank, Field f) {
    return messages[static_cast<size_t>(rank * kWidth + f)];
  };
  for (int r = 0; r < ranks; ++r) {
    if (field(r, kRefused) != 0) return "rank " + std::to_string(r) + " refused its arguments";
  }
  for (const auto& [f, words] :
       {std::pair(kExperts, "experts"), std::pair(kColumns, "columns of rows"),
        std::pair(kDType, "as dtype of rows")}) {
    for (int r = 1; r < ranks; ++r) {
      if (field(r, f) == field(0, f)) continue;
      return "rank " + std::to_string(r) + " has " + std::to_string(field(r, f)) + ", and rank 0 " +
             std::to_string(field(0, f)) + " " + words + "; they must be equal";
    }
  }
  for (int r = 0; r < ranks; ++r) {
    const std::string who = "rows_of_experts of rank " + std::to_string(r);
    if (field(r, kLeast) < 0) {
      return who + " has " + std::to_string(field(r, kLeast)) + "; no expert has fewer than 0 rows";
    }
    if (field(r, kSum) == field(r, kRows)) continue;
    return who + " sums to " + std::to_string(field(r, kSum)) + "; its rows are " +
           std::to_string(field(r, kRows));
  }
  return "";
}

Status refuse_route(const std::string& why) { return invalid_argument("ExpertRoute: " + why); }

Result<Tensor> empty_rows(const Tensor& like, int64_t rows) {
  Shape shape(like.shape().begin(), like.shape().end());
  shape.front() = rows;
  return Tensor::empty(shape, like.dtype(), like.device());
}

class CommExperts final : public ExpertRanks {
 public:
  explicit CommExperts(std::shared_ptr<const Comm> ranks) : ranks_(std::move(ranks)) {}
  int size() const noexcept override { return ranks_->size(); }
  int rank() const noexcept override { return ranks_->rank(); }
  Device device() const override { return ranks_->device(); }
  Status all_to_all(const Tensor& from, const Tensor& to) override {
    te_fl_all_to_all_args args{};
    args.input = from;
    args.output = to;
    args.comm = ranks_->c();
    return ops::all_to_all(args, detail::call_options(from.device()));
  }
  Status move_rows(bool dispatches, const RowsWithProbs& from, const RowsWithProbs& to,
                   std::span<const int64_t> sent, std::span<const int64_t> received) override {
    te_fl_moe_transfer_args args{};
    args.input = from.rows;
    args.output = to.rows;
    if (from.probs.defined()) {
      args.probs = from.probs;
      args.output_probs = to.probs;
    }
    args.comm = ranks_->c();
    args.input_rows = sent.data();
    args.output_rows = received.data();
    args.input_rows_count = args.output_rows_count = static_cast<int64_t>(sent.size());
    const CallOptions options = detail::call_options(from.rows.device());
    return dispatches ? ops::moe_dispatch(args, options) : ops::moe_combine(args, options);
  }

 private:
  std::shared_ptr<const Comm> ranks_;
};

}  // namespace

ExpertRanks::~ExpertRanks() = default;

RowTransfer& RowTransfer::operator=(RowTransfer&& other) noexcept {
  std::swap(sent_, other.sent_);
  std::swap(received_, other.received_);
  std::swap(side_, other.side_);
  std::swap(done_, other.done_);
  std::swap(flies_, other.flies_);
  return *this;
}

RowTransfer::~RowTransfer() {
  // The tensors must live until the transfer has ended.
  if (flies_ && side_.get() != nullptr) (void)devices::synchronize(side_.device(), side_.get());
}

Result<RowsWithProbs> RowTransfer::wait() {
  if (!received_.rows.defined()) {
    return failed_precondition("RowTransfer: wait() was called before, or there is no transfer");
  }
  if (std::exchange(flies_, false)) {
    const Device& device = side_.device();
    TE_FL_RETURN_IF_ERROR(
        devices::wait_event(device, done_.get(), devices::current_stream(device)));
  }
  sent_ = {};
  return std::exchange(received_, RowsWithProbs());
}

Result<ExpertRoute> ExpertRoute::create(std::shared_ptr<const Comm> ranks,
                                        std::span<const int64_t> rows_of_experts,
                                        const Tensor& rows) {
  if (ranks == nullptr || !*ranks) return refuse_route("ranks is empty; give a communicator");
  return create(std::make_shared<CommExperts>(std::move(ranks)), rows_of_experts, rows);
}

Result<ExpertRoute> ExpertRoute::create(std::shared_ptr<ExpertRanks> ranks,
                                        std::span<const int64_t> rows_of_experts,
                                        const Tensor& rows) {
  const int size = ranks->size();
  const std::string mine = problem(*ranks, rows_of_experts, rows);
  const int64_t experts = mine.empty() ? static_cast<int64_t>(rows_of_experts.size()) / size : 0;
  const int64_t here = std::min(experts, kHere);
  std::vector<int64_t> message(static_cast<size_t>(size * kWidth));
  for (int r = 0; r < size; ++r) {
    int64_t* const to = message.data() + r * kWidth;
    to[kRefused] = mine.empty() ? 0 : 1;
    if (!mine.empty()) continue;
    to[kExperts] = experts * size;
    to[kColumns] = rows.size(1);
    to[kDType] = static_cast<int64_t>(rows.dtype());
    to[kRows] = rows.size(0);
    to[kSum] = std::accumulate(rows_of_experts.begin(), rows_of_experts.end(), int64_t{0});
    to[kLeast] = *std::ranges::min_element(rows_of_experts);
    std::copy_n(rows_of_experts.begin() + r * experts, here, to + kFields);
  }
  TE_FL_ASSIGN_OR_RETURN(const std::vector<int64_t> got, exchange(*ranks, message, kWidth));
  if (!mine.empty()) return refuse_route(mine);
  if (const std::string why = disagreement(got, size); !why.empty()) return refuse_route(why);

  ExpertRoute route;
  route.sent_.assign(rows_of_experts.begin(), rows_of_experts.end());
  route.received_.resize(route.sent_.size());
  for (int64_t r = 0; r < size; ++r) {
    std::copy_n(got.begin() + r * kWidth + kFields, here, route.received_.begin() + r * experts);
  }
  if (experts > kHere) {
    const int64_t more = experts - kHere;
    std::vector<int64_t> rest;
    for (int64_t r = 0; r < size; ++r) {
      const auto first = rows_of_experts.begin() + r * experts;
      rest.insert(rest.end(), first + kHere, first + experts);
    }
    TE_FL_ASSIGN_OR_RETURN(const std::vector<int64_t> came, exchange(*ranks, rest, more));
    for (int64_t r = 0; r < size; ++r) {
      std::copy_n(came.begin() + r * more, more, route.received_.begin() + r * experts + kHere);
    }
  }
  route.splits_.assign(static_cast<size_t>(experts), 0);
  for (size_t i = 0; i < route.received_.size(); ++i) {
    route.splits_[i % static_cast<size_t>(experts)] += route.received_[i];
  }
  route.ranks_ = std::move(ranks);
  return route;
}

Result<RowTransfer> ExpertRoute::start(bool dispatches, const Tensor& rows, const Tensor& probs,
                                       bool beside) const {
  const std::vector<int64_t>& sent = dispatches ? sent_ : received_;
  const std::vector<int64_t>& received = dispatches ? received_ : sent_;
  const int64_t awaited = std::accumulate(sent.begin(), sent.end(), int64_t{0});
  if (!rows.defined() || rows.rank() != 2 || rows.quantized() || rows.size(0) != awaited) {
    return refuse_route(std::string(dispatches ? "dispatch" : "combine") + ": rows is " +
                        (rows.defined() ? rows.describe() : std::string("undefined")) +
                        "; it is an unquantised matrix of " + std::to_string(awaited) + " rows");
  }
  RowTransfer transfer;
  TE_FL_ASSIGN_OR_RETURN(transfer.sent_.rows, detail::compact(rows));
  const int64_t count = std::accumulate(received.begin(), received.end(), int64_t{0});
  TE_FL_ASSIGN_OR_RETURN(transfer.received_.rows, empty_rows(rows, count));
  if (probs.defined()) {
    TE_FL_ASSIGN_OR_RETURN(transfer.sent_.probs, detail::compact(probs));
    TE_FL_ASSIGN_OR_RETURN(transfer.received_.probs, empty_rows(probs, count));
  }
  const auto move = [&] {
    return ranks_->move_rows(dispatches, transfer.sent_, transfer.received_, sent, received);
  };
  const Device& device = rows.device();
  if (beside && !device.is_host()) {
    Result<Stream> side = Stream::create(device);
    if (side.ok()) {
      transfer.side_ = std::move(side).value();
    } else if (side.status().code() != StatusCode::kUnsupported) {
      return side.status();
    }
  }
  if (transfer.side_.get() == nullptr) {  // the host, or a device without streams
    TE_FL_RETURN_IF_ERROR(move());
    return transfer;
  }
  TE_FL_ASSIGN_OR_RETURN(Event ready, Event::create(device));
  TE_FL_ASSIGN_OR_RETURN(transfer.done_, Event::create(device));
  TE_FL_RETURN_IF_ERROR(ready.record(devices::current_stream(device)));
  TE_FL_RETURN_IF_ERROR(transfer.side_.wait(ready));
  transfer.flies_ = true;
  const StreamScope scope(transfer.side_);
  TE_FL_RETURN_IF_ERROR(move());
  TE_FL_RETURN_IF_ERROR(transfer.done_.record(transfer.side_.get()));
  return transfer;
}

Result<RowTransfer> ExpertRoute::start_dispatch(const Tensor& rows, const Tensor& probs) const {
  return start(true, rows, probs, true);
}

Result<RowTransfer> ExpertRoute::start_combine(const Tensor& rows, const Tensor& probs) const {
  return start(false, rows, probs, true);
}

Result<RowsWithProbs> ExpertRoute::dispatch(const Tensor& rows, const Tensor& probs) const {
  TE_FL_ASSIGN_OR_RETURN(RowTransfer transfer, start(true, rows, probs, false));
  return transfer.wait();
}

Result<RowsWithProbs> ExpertRoute::combine(const Tensor& rows, const Tensor& probs) const {
  TE_FL_ASSIGN_OR_RETURN(RowTransfer transfer, start(false, rows, probs, false));
  return transfer.wait();
}

namespace {

using Move = Result<RowsWithProbs> (ExpertRoute::*)(const Tensor&, const Tensor&) const;

Value recorded(const ExpertRoute& route, const Value& rows, Move forward, Move backward) {
  if (!rows.ok()) return rows;
  const auto run = [&](bool) -> Result<Tape::Recorded> {
    TE_FL_ASSIGN_OR_RETURN(RowsWithProbs moved, (route.*forward)(rows.tensor(), Tensor()));
    const auto back = [route, backward,
                       like = moved.rows](const Tape::Tensors& dys) -> Result<Tape::Tensors> {
      Tensor dy = dys[0];
      if (!dy.defined()) {  // the other ranks' gradients may need this rank's call
        TE_FL_ASSIGN_OR_RETURN(dy, detail::empty_like(like, like.dtype()));
        TE_FL_RETURN_IF_ERROR(detail::fill(dy, 0));
      }
      TE_FL_ASSIGN_OR_RETURN(RowsWithProbs dx, (route.*backward)(dy, Tensor()));
      return Tape::Tensors{std::move(dx.rows)};
    };
    return Tape::Recorded{{std::move(moved.rows)}, back};
  };
  return rows.tape()->record(std::span(&rows, 1), 1, run).front();
}

}  // namespace

Value ExpertRoute::dispatch(const Value& rows) const {
  return recorded(*this, rows, &ExpertRoute::dispatch, &ExpertRoute::combine);
}

Value ExpertRoute::combine(const Value& rows) const {
  return recorded(*this, rows, &ExpertRoute::combine, &ExpertRoute::dispatch);
}

}  // namespace te_fl::nn
