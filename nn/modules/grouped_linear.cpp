#include "te_fl/nn/modules/grouped_linear.hpp"

#include <algorithm>
#include <string>

#include "nn/autograd/ctx.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/modules/grouped_gemm.hpp"
#include "nn/modules/make_gemm.hpp"

namespace te_fl::nn {
namespace {

struct GroupedLinearRecord : Ctx::Record {
  std::vector<detail::GemmUnit::Use> uses;
  std::vector<int64_t> splits;
  Shape shape;        // of x
  Tensor input_grad;  // memory for the gradient; undefined: allocate
  void visit_tensors(const Ctx::Visitor& visitor) {
    for (auto& use : uses) use.visit_tensors(visitor);
  }
};

// True if the numbers are non-negative and sum to `rows`. Does not overflow.
bool sum_to(std::span<const int64_t> numbers, int64_t rows) {
  for (const int64_t number : numbers) {
    if (number > rows) return false;
    rows -= number;
  }
  return rows == 0;
}

Status check_splits(std::span<const int64_t> splits, size_t members, const Tensor& x) {
  std::string why;
  if (splits.size() != members) {
    why = "one number for each of the " + std::to_string(members) + " maps";
  } else if (std::ranges::any_of(splits, [](int64_t rows) { return rows < 0; })) {
    why = "no number below 0";
  } else if (x.shape().size() != 2 || !sum_to(splits, x.size(0))) {
    why = "numbers that sum to the rows of x, which is " + x.describe();
  } else {
    return {};
  }
  std::string list;
  for (const int64_t rows : splits) list += (list.empty() ? "" : ",") + std::to_string(rows);
  return invalid_argument("GroupedLinear: splits is [" + list + "]; it has " + why);
}

Status check_memory(const Tensor& memory, const Shape& shape, DType dtype, const char* name) {
  if (!memory.defined() || (memory.contiguous() && memory.dtype() == dtype &&
                            std::ranges::equal(memory.shape(), shape))) {
    return {};
  }
  return invalid_argument("GroupedLinear: the memory for " + std::string(name) + " is " +
                          memory.describe() + "; it must be compact, and as the result is");
}

}  // namespace

GroupedLinear::GroupedLinear() = default;
GroupedLinear::~GroupedLinear() = default;

Result<std::unique_ptr<GroupedLinear>> GroupedLinear::create(const GroupedLinearOptions& options) {
  TE_FL_RETURN_IF_ERROR(detail::check_size("GroupedLinear", "num_gemms", options.num_gemms));
  std::vector<std::unique_ptr<detail::GemmUnit>> units;
  for (int64_t i = 0; i < options.num_gemms; ++i) {
    TE_FL_ASSIGN_OR_RETURN(auto unit,
                           detail::make_gemm({.module = "GroupedLinear",
                                              .in = options.in_features,
                                              .out = options.out_features,
                                              .bias = options.bias,
                                              .param_dtype = options.param_dtype,
                                              .activation_dtype = options.activation_dtype,
                                              .device = options.device,
                                              .seed = init::subseed(options.seed, i),
                                              .init_std = options.init_std,
                                              .return_bias = options.return_bias}));
    units.push_back(std::move(unit));
  }
  std::unique_ptr<GroupedLinear> module(new GroupedLinear);
  module->group_ = std::make_unique<detail::GroupedGemm>(std::move(units));
  detail::GroupedGemm& group = *module->group_;
  if (options.single_grouped_weight) {
    TE_FL_RETURN_IF_ERROR(group.group_weights("GroupedLinear"));
  }
  if (options.single_grouped_bias) TE_FL_RETURN_IF_ERROR(group.group_biases("GroupedLinear"));
  const auto& made = group.units();
  if (group.weight() != nullptr) module->register_parameter("weight", group.weight()->whole());
  for (size_t i = 0; i < made.size(); ++i) {
    const std::string number = std::to_string(i);
    if (group.weight() == nullptr) module->register_parameter("weight" + number, made[i]->weight());
    module->register_fp8("gemm" + number, made[i]->forward_state(), made[i]->backward_state());
  }
  if (group.bias() != nullptr) module->register_parameter("bias", group.bias()->whole());
  for (size_t i = 0; i < made.size() && options.bias && group.bias() == nullptr; ++i) {
    module->register_parameter("bias" + std::to_string(i), made[i]->bias());
  }
  module->register_delayed(module->group_->delayed());
  return module;
}

Result<Tensor> GroupedLinear::forward(const Tensor& x, std::span<const int64_t> splits, Ctx* ctx,
                                      const ForwardOptions& options, const GroupedMemory& memory) {
  TE_FL_ASSIGN_OR_RETURN(auto record,
                         detail::new_record<GroupedLinearRecord>(ctx, "GroupedLinear"));
  TE_FL_ASSIGN_OR_RETURN(const Tensor rows,
                         detail::as_matrix(x, group_->spec().in, "GroupedLinear: x"));
  TE_FL_RETURN_IF_ERROR(check_splits(splits, group_->units().size(), x));
  const auto& spec = group_->spec();
  TE_FL_RETURN_IF_ERROR(
      check_memory(memory.output, {rows.size(0), spec.out}, spec.activation_dtype, "the output"));
  TE_FL_RETURN_IF_ERROR(
      check_memory(memory.input_grad, {rows.size(0), spec.in}, x.dtype(), "the gradient of x"));
  TE_FL_ASSIGN_OR_RETURN(
      Tensor y, group_->forward(record->uses, rows, splits, options, ctx != nullptr, memory.output,
                                memory.input_grad));
  record->input_grad = memory.input_grad;
  record->splits.assign(splits.begin(), splits.end());
  record->shape.assign(x.shape().begin(), x.shape().end());
  if (ctx != nullptr) TE_FL_RETURN_IF_ERROR(ctx->store(this, std::move(record)));
  return y;
}

Result<Tensor> GroupedLinear::backward(const Tensor& dy, Ctx& ctx) {
  TE_FL_ASSIGN_OR_RETURN(auto taken, ctx.take(this, "GroupedLinear"));
  auto& record = static_cast<GroupedLinearRecord&>(*taken);
  TE_FL_RETURN_IF_ERROR(
      detail::check_gradient(dy, record.shape, group_->spec().out, "GroupedLinear"));
  TE_FL_ASSIGN_OR_RETURN(const Tensor rows,
                         detail::as_matrix(dy, group_->spec().out, "GroupedLinear: dy"));
  return group_->backward(record.uses, rows, record.splits, ctx.input_grad, record.input_grad);
}

}  // namespace te_fl::nn
