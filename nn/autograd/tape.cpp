#include "te_fl/nn/autograd/tape.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "nn/autograd/parameter.hpp"
#include "nn/autograd/parameter_state.hpp"
#include "nn/base/tensor_ops.hpp"
#include "te_fl/nn/autograd/recompute.hpp"
#include "te_fl/nn/fp8/autocast.hpp"

namespace te_fl::nn {

namespace detail {

// The gradient of one value during a backward, shared by the handles of the value.
struct Gradient {
  Tensor sum;  // undefined: no gradient has arrived
  bool kept = false;
  uint64_t epoch = 0;  // epoch of its tape
};

}  // namespace detail

namespace {

using detail::Gradient;

Status add_to(Gradient& gradient, const Tensor& part) {
  if (!gradient.sum.defined()) {
    gradient.sum = part;
    return {};
  }
  // Writes the sum to new memory, since the tensor that arrived first may also be the gradient of
  // another value.
  TE_FL_ASSIGN_OR_RETURN(Tensor sum, detail::empty_like(gradient.sum, gradient.sum.dtype()));
  TE_FL_RETURN_IF_ERROR(detail::add(gradient.sum, part, sum));
  gradient.sum = std::move(sum);
  return {};
}

}  // namespace

Value::Value() : status_(failed_precondition("Value: nothing has made this value")) {}
Value::~Value() = default;
Value::Value(const Value&) = default;
Value& Value::operator=(const Value&) = default;
Value::Value(Value&&) noexcept = default;
Value& Value::operator=(Value&&) noexcept = default;

Tensor Value::grad() const {
  return gradient_ != nullptr && gradient_->kept ? gradient_->sum : Tensor();
}

struct Tape::Node {
  std::vector<std::shared_ptr<Gradient>> inputs;  // null: no gradient needed
  std::vector<std::shared_ptr<Gradient>> outputs;
  Backward backward;
  std::vector<std::shared_ptr<Parameter>> parameters;
};

Tape::Tape(bool training) : training_(training) {}
Tape::~Tape() = default;

Value Tape::input(Tensor tensor, bool wants_grad) {
  if (!tensor.defined()) return error(invalid_argument("Tape::input: the tensor is undefined"));
  Value value;
  value.tape_ = this;
  value.tensor_ = std::move(tensor);
  value.status_ = Status();
  if (wants_grad) {
    value.gradient_ = std::make_shared<Gradient>();
    value.gradient_->kept = true;
    value.gradient_->epoch = epoch_;
  }
  return value;
}

Value Tape::error(Status status) {
  Value value;
  value.tape_ = this;
  value.status_ = std::move(status);
  return value;
}

std::vector<Value> Tape::record(std::span<const Value> inputs, size_t count,
                                const std::function<Result<Recorded>(bool training)>& run) {
  const auto fail = [&](const Status& status) { return std::vector<Value>(count, error(status)); };
  bool wanted = false;
  for (const Value& value : inputs) {
    if (!value.ok()) return fail(value.status());
    if (value.tape_ != this) {
      return fail(invalid_argument("Tape: a call mixes values of two tapes; give each its own"));
    }
    if (value.gradient_ == nullptr) continue;
    wanted = true;
    if (value.gradient_->epoch != epoch_) {
      return fail(failed_precondition(
          "Tape: a value from before the last backward() is used, which has dropped what it was "
          "made from; give its tensor to input() again"));
    }
  }
  Result<Recorded> recorded = run(training_);
  if (!recorded.ok()) return fail(recorded.status());
  std::vector<std::shared_ptr<Parameter>>& parameters = recorded->parameters;
  used_.insert(used_.end(), parameters.begin(), parameters.end());
  const bool records = training_ && (wanted || !parameters.empty());
  std::vector<Value> values;
  Node node;
  for (Tensor& tensor : recorded->results) {
    values.push_back(input(std::move(tensor)));
    if (!records) continue;
    node.outputs.push_back(values.back().gradient_ = std::make_shared<Gradient>());
    node.outputs.back()->epoch = epoch_;
  }
  // In activation recomputation the first run saves nothing; the second run records everything.
  if (!records || recompute_phase() == RecomputePhase::kFirst) return values;
  for (const Value& value : inputs) node.inputs.push_back(value.gradient_);
  node.backward = std::move(recorded->backward);
  node.parameters = std::move(parameters);
  nodes_.push_back(std::move(node));
  return values;
}

Status Tape::run_node(Node& node) {
  Tensors dys;
  bool reached = false;
  for (const auto& output : node.outputs) {
    reached = reached || output->sum.defined();
    dys.push_back(std::exchange(output->sum, Tensor()));
  }
  if (!reached) return {};
  const Backward backward = std::exchange(node.backward, nullptr);
  TE_FL_ASSIGN_OR_RETURN(const Tensors dxs, backward(dys));
  for (size_t i = 0; i < node.inputs.size() && i < dxs.size(); ++i) {
    if (node.inputs[i] == nullptr || !dxs[i].defined()) continue;
    TE_FL_RETURN_IF_ERROR(add_to(*node.inputs[i], dxs[i]));
  }
  return {};
}

Status Tape::run(const Value& of, const Tensor& gradient) {
  if (!of.ok()) return of.status();
  if (!training_) {
    return failed_precondition(
        "Tape::backward: the tape was made for inference and has kept "
        "nothing; make it with training = true");
  }
  if (of.gradient_ == nullptr) {
    return failed_precondition(
        "Tape::backward: the value depends on no parameter that is trained "
        "and on no input that wants a gradient");
  }
  if (of.tape_ != this || of.gradient_->epoch != epoch_) {
    return failed_precondition(
        "Tape::backward: the value is of another tape or of an earlier "
        "backward()");
  }
  of.gradient_->sum = gradient;
  if (!gradient.defined()) {
    if (of.tensor_.numel() != 1) {
      return invalid_argument("Tape::backward: the value is " + of.tensor_.describe() +
                              "; it must have one element, or its gradient must be given");
    }
    TE_FL_ASSIGN_OR_RETURN(of.gradient_->sum, detail::empty_like(of.tensor_, of.tensor_.dtype()));
    TE_FL_RETURN_IF_ERROR(detail::fill(of.gradient_->sum, 1));
  } else if (!std::ranges::equal(gradient.shape(), of.tensor_.shape())) {
    return invalid_argument("Tape::backward: the gradient is " + gradient.describe() +
                            "; it must have the shape of " + of.tensor_.describe());
  }
  std::map<const Parameter*, int64_t> left;  // number of calls whose backward is pending
  for (const Node& node : nodes_) {
    for (const auto& p : node.parameters) ++left[p.get()];
  }
  while (!nodes_.empty()) {
    Node node = std::move(nodes_.back());
    nodes_.pop_back();
    TE_FL_RETURN_IF_ERROR(run_node(node));
    if (hook_ == nullptr) continue;
    for (const auto& p : node.parameters) {
      const detail::ParameterState& state = p->internals();
      const bool complete = --left[p.get()] == 0 && p->requires_grad && state.grad_written &&
                            *state.delayed_wgrads == 0;
      if (complete) TE_FL_RETURN_IF_ERROR(hook_(*p));
    }
  }
  return {};
}

void Tape::clear() {
  nodes_.clear();
  used_.clear();
  ++epoch_;
}

Status Tape::backward(const Value& of, const Tensor& gradient) {
  Status status = run(of, gradient);
  clear();
  if (!status.ok()) return status;
  return backward_end();
}

Value Tape::checkpoint(std::function<Value(const Value& x)> segment, const Value& x) {
  if (!x.ok()) return x;
  const bool wants = x.gradient_ != nullptr;
  const auto used = std::make_shared<std::vector<std::shared_ptr<Parameter>>>();
  const Segment on_a_tape = [segment, wants, used, training = training_,
                             outer_options = options](const Tensor& in) -> Result<SegmentRun> {
    auto tape = std::make_shared<Tape>(training);
    tape->options = outer_options;
    const Value begin = tape->input(in, wants);
    const Value y = segment(begin);
    if (!y.ok()) return y.status();
    *used = tape->used_;
    return SegmentRun{y.tensor(), [tape, begin, y](const Tensor& dy) -> Result<Tensor> {
                        TE_FL_RETURN_IF_ERROR(tape->run(y, dy));
                        return begin.grad();
                      }};
  };
  return record({&x, 1}, 1, [&](bool training) -> Result<Recorded> {
    TE_FL_ASSIGN_OR_RETURN(
        SegmentRun run, training ? nn::checkpoint(on_a_tape, x.tensor()) : on_a_tape(x.tensor()));
    const auto backward = [back = std::move(run.backward)](const Tensors& dys) -> Result<Tensors> {
      TE_FL_ASSIGN_OR_RETURN(Tensor dx, back(dys[0]));
      return Tensors{std::move(dx)};
    };
    return Recorded{{run.y}, backward, *used};
  })[0];
}

namespace {

// The first value that holds an error; the first value if none does.
const Value& first_error(std::initializer_list<const Value*> values) {
  for (const Value* value : values) {
    if (!value->ok()) return *value;
  }
  return **values.begin();
}

}  // namespace

Value operator+(const Value& a, const Value& b) {
  const Value& first = first_error({&a, &b});
  if (!first.ok()) return first;
  const std::array<Value, 2> inputs = {a, b};
  return a.tape()->record(inputs, 1, [&](bool) -> Result<Tape::Recorded> {
    TE_FL_ASSIGN_OR_RETURN(const Tensor left, detail::compact(a.tensor()));
    TE_FL_ASSIGN_OR_RETURN(const Tensor right, detail::compact(b.tensor()));
    TE_FL_ASSIGN_OR_RETURN(Tensor y, detail::empty_like(left, left.dtype()));
    TE_FL_RETURN_IF_ERROR(detail::add(left, right, y));
    return Tape::Recorded{
        {std::move(y)}, [dtype = right.dtype()](const Tape::Tensors& dys) -> Result<Tape::Tensors> {
          TE_FL_ASSIGN_OR_RETURN(Tensor other, detail::cast(dys[0], dtype));
          return Tape::Tensors{dys[0], std::move(other)};
        }};
  })[0];
}

Value Value::view(std::initializer_list<int64_t> shape) const {
  if (!ok()) return *this;
  return tape_->record({this, 1}, 1, [&](bool) -> Result<Tape::Recorded> {
    TE_FL_ASSIGN_OR_RETURN(Tensor y, tensor_.view(shape));
    return Tape::Recorded{{std::move(y)},
                          [before = Shape(tensor_.shape().begin(), tensor_.shape().end())](
                              const Tape::Tensors& dys) -> Result<Tape::Tensors> {
                            TE_FL_ASSIGN_OR_RETURN(const Tensor dy, detail::compact(dys[0]));
                            TE_FL_ASSIGN_OR_RETURN(Tensor dx, dy.view(before));
                            return Tape::Tensors{std::move(dx)};
                          }};
  })[0];
}

namespace {

// The gradient of a split: the concatenation of the parts' gradients, with zeros for missing ones.
Result<Tape::Tensors> join(const Tape::Tensors& dys, const Shape& shape, DType dtype,
                           const Device& device) {
  TE_FL_ASSIGN_OR_RETURN(Tensor dx, Tensor::empty(shape, dtype, device));
  const int last = dx.rank() - 1;
  const int64_t width = dx.size(last) / static_cast<int64_t>(dys.size());
  for (size_t i = 0; i < dys.size(); ++i) {
    const int64_t begin = static_cast<int64_t>(i) * width;
    TE_FL_ASSIGN_OR_RETURN(const Tensor part, dx.slice(last, begin, begin + width));
    if (dys[i].defined()) {
      TE_FL_RETURN_IF_ERROR(detail::copy(dys[i], part));
    } else {
      TE_FL_ASSIGN_OR_RETURN(const Tensor zero, Tensor::zeros(part.shape(), dtype, device));
      TE_FL_RETURN_IF_ERROR(detail::copy(zero, part));
    }
  }
  return Tape::Tensors{std::move(dx)};
}

}  // namespace

void Value::split_into(std::span<Value> parts) const {
  if (!ok()) {
    std::ranges::fill(parts, *this);
    return;
  }
  const auto count = static_cast<int64_t>(parts.size());
  const auto run = [&](bool) -> Result<Tape::Recorded> {
    const int last = tensor_.rank() - 1;
    if (last < 0 || tensor_.size(last) % count != 0) {
      return invalid_argument("Value::split: the value is " + tensor_.describe() +
                              "; its last dimension must be a multiple of " +
                              std::to_string(count));
    }
    const int64_t width = tensor_.size(last) / count;
    Tape::Recorded recorded;
    for (int64_t i = 0; i < count; ++i) {
      TE_FL_ASSIGN_OR_RETURN(Tensor part, tensor_.slice(last, i * width, (i + 1) * width));
      recorded.results.push_back(std::move(part));
    }
    recorded.backward = [shape = Shape(tensor_.shape().begin(), tensor_.shape().end()),
                         dtype = tensor_.dtype(), device = tensor_.device()](
                            const Tape::Tensors& dys) { return join(dys, shape, dtype, device); };
    return recorded;
  };
  std::ranges::move(tape_->record({this, 1}, parts.size(), run), parts.begin());
}

}  // namespace te_fl::nn
