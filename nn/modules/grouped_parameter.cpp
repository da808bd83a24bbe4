#include "nn/modules/grouped_parameter.hpp"

#include <string>
#include <utility>

#include "core/tensor/tensor_access.hpp"
#include "nn/autograd/parameter.hpp"
#include "nn/base/tensor_ops.hpp"

namespace te_fl::nn::detail {

Result<std::unique_ptr<GroupedParameter>> GroupedParameter::create(
    const char* module, std::vector<std::shared_ptr<Parameter>> parts) {
  auto grouped = std::make_unique<GroupedParameter>();
  grouped->whole_ = std::make_shared<Parameter>();
  grouped->parts_ = std::move(parts);
  const Tensor& first = grouped->parts_.front()->value;
  if (first.quantized()) {
    return invalid_argument(std::string(module) +
                            ": single_grouped_weight is set under quantized_model_init, and the "
                            "codes of the experts do not share a scale; leave it out, or create "
                            "the module outside of that scope");
  }
  Shape shape = {static_cast<int64_t>(grouped->parts_.size())};
  shape.insert(shape.end(), first.shape().begin(), first.shape().end());
  Tensor& value = grouped->whole_->value;
  if (first.raw_data() == nullptr) {  // created under init::WithoutValues
    value = Tensor::Access::make({nullptr, shape, {}, first.dtype(), first.device(), nullptr});
  } else {
    TE_FL_ASSIGN_OR_RETURN(value, Tensor::empty(shape, first.dtype(), first.device()));
    for (size_t i = 0; i < grouped->parts_.size(); ++i) {
      TE_FL_ASSIGN_OR_RETURN(const Tensor to, grouped->slice(value, i));
      TE_FL_RETURN_IF_ERROR(copy(grouped->parts_[i]->value, to));
      grouped->parts_[i]->value = to;
    }
  }
  for (const auto& part : grouped->parts_) {
    part->internals().delayed_wgrads = grouped->whole_->internals().delayed_wgrads;
  }
  return grouped;
}

Result<Tensor> GroupedParameter::slice(const Tensor& whole, size_t part) const {
  const auto begin = static_cast<int64_t>(part);
  TE_FL_ASSIGN_OR_RETURN(const Tensor row, whole.slice(0, begin, begin + 1));
  return row.view(whole.shape().subspan(1));
}

Status GroupedParameter::spread() {
  const Tensor& value = whole_->value;
  if (value.raw_data() == nullptr) {
    return invalid_argument("the parameter " + value.describe() +
                            " has no memory; give it some with Parameter::borrow()");
  }
  const bool moved = spread_ != value.raw_data() || parts_.front()->value.dtype() != value.dtype();
  for (size_t i = 0; i < parts_.size(); ++i) {
    Parameter& part = *parts_[i];
    if (moved) {
      TE_FL_ASSIGN_OR_RETURN(part.value, slice(value, i));
    }
    part.version = whole_->version;
    part.requires_grad = whole_->requires_grad;
    part.grad_dtype = whole_->grad_dtype;
    part.internals().owners_version = whole_->internals().owners_version;
    part.internals().grad_cleared = whole_->internals().grad_cleared;
  }
  spread_ = value.raw_data();
  return {};
}

Status GroupedParameter::open_grad() {
  if (!whole_->requires_grad) return {};
  TE_FL_RETURN_IF_ERROR(adds(*whole_).status());  // allocates the gradient
  const ParameterState& state = whole_->internals();
  const Tensor& grad = whole_->grad;
  const bool moved = grad_ != grad.raw_data() || !parts_.front()->grad.defined() ||
                     parts_.front()->grad.dtype() != grad.dtype();
  for (size_t i = 0; i < parts_.size(); ++i) {
    Parameter& part = *parts_[i];
    if (moved) {
      TE_FL_ASSIGN_OR_RETURN(part.grad, slice(grad, i));
    }
    part.internals().grad_written = state.grad_written;
    part.internals().grad_stale = state.grad_stale;
    part.internals().grad_cleared_in = state.grad_cleared_in;
  }
  grad_ = grad.raw_data();
  return {};
}

void GroupedParameter::close_grad() {
  if (!whole_->requires_grad) return;
  whole_->internals().gradient_updates = parts_.front()->internals().gradient_updates;
  wrote(*whole_);
  if (!whole_->internals().owners_version.has_value()) return;
  // The owner of a borrowed parameter takes the gradient, whose memory must then be its alone.
  for (const auto& part : parts_) part->grad = Tensor();
}

}  // namespace te_fl::nn::detail
