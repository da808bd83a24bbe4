#include "nn/modules/split_parameters.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "core/tensor/tensor_access.hpp"
#include "nn/autograd/parameter.hpp"
#include "nn/base/capture.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/fp8/fp8_values.hpp"
#include "nn/modules/gemm_unit.hpp"
#include "te_fl/device.hpp"

namespace te_fl::nn::detail {

namespace {

// Returns the place of part number `part` of a sharded parameter. It is relative to the complete
// part if the part is one range of the shard's rows; otherwise relative to the complete parameter.
Shard place_of_part(const Parameter& shard_of_all, const std::vector<int64_t>& rows, size_t part) {
  Shard place = shard_of_all.shard;
  if (place.whole.empty()) return place;
  const bool ranges = place.rows.size() == rows.size();
  const int64_t degree = place.whole[0] / shard_of_all.value.size(0);
  int64_t before = 0;
  for (size_t i = 0; i < part; ++i) before += rows[i];
  const int64_t begin = ranges ? place.rows[part].begin : place.begin[0] + before;
  place.rows.clear();
  place.begin[0] = begin;
  const int64_t own_begin = begin - before * degree;
  if (own_begin < 0 || own_begin > rows[part] * (degree - 1)) return place;
  place.whole[0] = rows[part] * degree;
  place.begin[0] = own_begin;
  return place;
}

}  // namespace

Result<std::unique_ptr<JoinedParameter>> JoinedParameter::create(std::shared_ptr<Parameter> whole,
                                                                 const std::vector<int64_t>& rows) {
  std::unique_ptr<JoinedParameter> joined(new JoinedParameter(std::move(whole), rows));
  const Tensor& value = joined->whole_->value;
  int64_t begin = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    joined->begins_.push_back(begin);
    auto part = std::make_shared<Parameter>();
    if (value.raw_data() == nullptr) {  // created under init::WithoutValues
      Shape shape(value.shape().begin(), value.shape().end());
      shape[0] = rows[i];
      part->value =
          Tensor::Access::make({nullptr, shape, {}, value.dtype(), value.device(), nullptr});
    } else {
      TE_FL_ASSIGN_OR_RETURN(part->value, value.slice(0, begin, begin + rows[i]));
    }
    part->shard = place_of_part(*joined->whole_, rows, i);
    part->internals().delayed_wgrads = joined->whole_->internals().delayed_wgrads;
    joined->parts_.push_back(std::move(part));
    begin += rows[i];
  }
  return joined;
}

Result<Tensor> JoinedParameter::slice(const Tensor& whole, size_t part) const {
  return whole.slice(0, begins_[part], begins_[part] + rows_[part]);
}

bool JoinedParameter::adjacent() const {
  const char* next = parts_[0]->value.data<char>();
  for (const auto& part : parts_) {
    if (part->value.data<char>() != next) return false;
    next += bytes_for(part->value.dtype(), part->value.numel());
  }
  return true;
}

Status JoinedParameter::copy_together() {
  const Tensor& first = parts_[0]->value;
  void* const stream = devices::current_stream(first.device());
  TE_FL_ASSIGN_OR_RETURN(const bool captured, capturing(first.device()));
  const bool room = copies_.defined() && copies_.dtype() == first.dtype();
  if (room && !captured && copied_version_ == whole_->version && copied_stream_ == stream) {
    return {};
  }
  // Allocates new memory during a capture, since graphs captured earlier keep reading the old
  // memory.
  if (!room || captured) {
    TE_FL_ASSIGN_OR_RETURN(copies_,
                           Tensor::empty(whole_->value.shape(), first.dtype(), first.device()));
  }
  for (size_t i = 0; i < parts_.size(); ++i) {
    TE_FL_ASSIGN_OR_RETURN(const Tensor to, slice(copies_, i));
    TE_FL_RETURN_IF_ERROR(copy(parts_[i]->value, to));
  }
  if (captured) keep_for_graph(std::make_shared<Tensor>(copies_));
  copied_version_ = captured ? UINT64_MAX : whole_->version;  // later eager calls copy again
  copied_stream_ = captured ? nullptr : stream;
  return {};
}

Status JoinedParameter::gather() {
  uint64_t version = 0;
  bool wanted = false;
  const Tensor& first = parts_[0]->value;
  for (const auto& part : parts_) {
    version = version * 1000003 + part->version;  // a hash of the parts' versions
    wanted = wanted || part->requires_grad;
    if (part->value.raw_data() == nullptr) {
      return invalid_argument("the parameter " + part->value.describe() +
                              " has no memory; give it some with Parameter::borrow()");
    }
    if (part->value.quantized()) {
      return invalid_argument("a part of a parameter is " + part->value.describe() +
                              "; parts are in high precision, because codes that do not share a "
                              "scale are no one tensor: use whole parameters");
    }
    if (part->value.dtype() != first.dtype()) {
      return invalid_argument("the parts of a parameter are " + first.describe() + " and " +
                              part->value.describe() + "; they must have one dtype");
    }
  }
  whole_->version = version;
  whole_->requires_grad = wanted;
  whole_->grad_dtype = parts_[0]->grad_dtype;
  whole_->internals().owners_version = parts_[0]->internals().owners_version;
  if (own_.raw_data() != first.raw_data()) own_ = Tensor();
  if (!adjacent()) {
    TE_FL_RETURN_IF_ERROR(copy_together());
    whole_->value = copies_;
    return {};
  }
  copies_ = Tensor();
  if (own_.defined()) {
    whole_->value = own_;
    return {};
  }
  const Shape shape(whole_->value.shape().begin(), whole_->value.shape().end());
  TE_FL_ASSIGN_OR_RETURN(whole_->value, Tensor::wrap(first.raw_data(), shape, {}, first.dtype(),
                                                     first.device(), nullptr));
  return {};
}

bool JoinedParameter::shares_grad() const {
  const Tensor& grad = whole_->grad;
  if (!grad.defined()) return false;
  const char* next = grad.data<char>();
  const Parameter& first = *parts_[0];
  for (const auto& part : parts_) {
    const bool same = part->requires_grad && part->grad.defined() &&
                      part->grad.dtype() == grad.dtype() && part->grad.data<char>() == next &&
                      part->internals().grad_written == first.internals().grad_written &&
                      part->internals().grad_cleared_in == first.internals().grad_cleared_in;
    if (!same) return false;
    next += bytes_for(grad.dtype(), part->grad.numel());
  }
  return true;
}

// Allocates one gradient for all parts, none of which has a gradient.
Status JoinedParameter::make_shared_grad() {
  drop_grad(*whole_);
  TE_FL_RETURN_IF_ERROR(adds(*whole_).status());
  for (size_t i = 0; i < parts_.size(); ++i) {
    Parameter& part = *parts_[i];
    TE_FL_ASSIGN_OR_RETURN(part.grad, slice(whole_->grad, i));
    part.internals().grad_written = false;
    part.internals().grad_stale = true;
    part.internals().grad_cleared_in = whole_->internals().grad_cleared_in;
  }
  return {};
}

Status JoinedParameter::open_grad() {
  if (!whole_->requires_grad) return {};
  const bool none = std::all_of(parts_.begin(), parts_.end(), [&](const auto& part) {
    return part->requires_grad && !part->grad.defined() && part->grad_dtype == whole_->grad_dtype;
  });
  if (none) TE_FL_RETURN_IF_ERROR(make_shared_grad());
  shared_ = shares_grad();
  whole_->internals().grad_cleared = std::any_of(
      parts_.begin(), parts_.end(),
      [](const auto& part) { return part->requires_grad && part->internals().grad_cleared; });
  if (shared_) {
    whole_->internals().grad_written = parts_[0]->internals().grad_written;
    whole_->internals().grad_stale = parts_[0]->internals().grad_stale;
    whole_->internals().grad_cleared_in = parts_[0]->internals().grad_cleared_in;
    return {};
  }
  // If the parts' gradients are not slices of one tensor, the GEMM writes the complete gradient to
  // scratch memory, and close_grad() adds it to the parts' gradients.
  if (!scratch_.defined() || scratch_.dtype() != whole_->grad_dtype) {
    TE_FL_ASSIGN_OR_RETURN(scratch_, empty_like(whole_->value, whole_->grad_dtype));
    keeps_scratch_ = false;
  }
  whole_->grad = scratch_;
  TE_FL_RETURN_IF_ERROR(fill(whole_->grad, 0));
  whole_->internals().grad_stale = false;
  whole_->internals().grad_written =
      std::any_of(parts_.begin(), parts_.end(),
                  [](const auto& part) { return part->internals().grad_written; });
  return {};
}

Status JoinedParameter::close_grad() {
  if (!whole_->requires_grad) return {};
  const bool written =
      whole_->internals().grad_written;  // false: all parts were frozen in the forward
  for (size_t i = 0; i < parts_.size(); ++i) {
    Parameter& part = *parts_[i];
    part.internals().gradient_updates = whole_->internals().gradient_updates;
    if (!part.requires_grad || !written) continue;
    if (!shared_) {
      TE_FL_ASSIGN_OR_RETURN(const bool sums, adds(part));
      TE_FL_ASSIGN_OR_RETURN(const Tensor from, slice(whole_->grad, i));
      TE_FL_RETURN_IF_ERROR(sums ? add(part.grad, from, part.grad) : copy(from, part.grad));
    }
    wrote(part);
  }
  if (shared_) return {};
  // After a capture the scratch memory is kept, since the graph's launches check that it still
  // exists.
  TE_FL_ASSIGN_OR_RETURN(const bool captured, capturing(whole_->value.device()));
  keeps_scratch_ = keeps_scratch_ || captured;
  if (keeps_scratch_) return {};
  drop_grad(*whole_);
  scratch_ = Tensor();
  return {};
}

Result<std::unique_ptr<SplitParameters>> SplitParameters::create(
    const char* module, const GemmUnit& gemm, const std::vector<ParameterPart>& parts) {
  auto split = std::make_unique<SplitParameters>();
  std::vector<int64_t> rows;
  int64_t total = 0;
  for (const ParameterPart& part : parts) {
    if (part.rows < 1 || part.rows > gemm.spec().out - total) {
      return invalid_argument(std::string(module) + ": the part \"" + part.name +
                              "\" of parameters_split has " + std::to_string(part.rows) +
                              " rows; each must have at least 1, and all of them together " +
                              std::to_string(gemm.spec().out) + " (the output features)");
    }
    total += part.rows;
    rows.push_back(part.rows);
    split->names_.push_back(part.name);
  }
  if (total != gemm.spec().out) {
    return invalid_argument(std::string(module) + ": the parts of parameters_split have " +
                            std::to_string(total) + " rows together; they must have " +
                            std::to_string(gemm.spec().out) + " (the output features)");
  }
  if (parts.size() == 1) {  // a single part is the complete parameter
    split->whole_weight_ = gemm.weight();
    split->whole_bias_ = gemm.bias();
    return split;
  }
  if (gemm.weight()->value.quantized()) {
    return invalid_argument(std::string(module) +
                            ": parameters_split is given under quantized_model_init, and codes "
                            "that share a scale are one parameter; create the module with whole "
                            "parameters (attention: fuse_qkv_params), or outside of that scope");
  }
  TE_FL_ASSIGN_OR_RETURN(split->weight_, JoinedParameter::create(gemm.weight(), rows));
  if (gemm.bias() != nullptr) {
    TE_FL_ASSIGN_OR_RETURN(split->bias_, JoinedParameter::create(gemm.bias(), rows));
  }
  return split;
}

std::vector<SplitParameters::Named> SplitParameters::named() const {
  std::vector<Named> result;
  if (whole_weight_ != nullptr) {
    result.push_back({names_[0] + "_weight", whole_weight_});
    if (whole_bias_ != nullptr) result.push_back({names_[0] + "_bias", whole_bias_});
    return result;
  }
  for (size_t i = 0; i < names_.size(); ++i) {
    result.push_back({names_[i] + "_weight", weight_->parts()[i]});
  }
  for (size_t i = 0; bias_ != nullptr && i < names_.size(); ++i) {
    result.push_back({names_[i] + "_bias", bias_->parts()[i]});
  }
  return result;
}

Status SplitParameters::gather() {
  if (weight_ == nullptr) return {};
  TE_FL_RETURN_IF_ERROR(weight_->gather());
  return bias_ == nullptr ? Status() : bias_->gather();
}

Status SplitParameters::open_grad() {
  if (weight_ == nullptr) return {};
  TE_FL_RETURN_IF_ERROR(gather());
  TE_FL_RETURN_IF_ERROR(weight_->open_grad());
  return bias_ == nullptr ? Status() : bias_->open_grad();
}

Status SplitParameters::close_grad() {
  if (weight_ == nullptr) return {};
  TE_FL_RETURN_IF_ERROR(weight_->close_grad());
  return bias_ == nullptr ? Status() : bias_->close_grad();
}

}  // namespace te_fl::nn::detail
