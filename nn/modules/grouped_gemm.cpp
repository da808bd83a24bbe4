#include "nn/modules/grouped_gemm.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "core/tensor/shared_blocks.hpp"
#include "nn/autograd/parameter.hpp"
#include "nn/base/tensor_ops.hpp"

namespace te_fl::nn::detail {
namespace {

using Product = te_fl_generic_gemm_args;

// Views of the row ranges of the units.
Result<std::vector<Tensor>> split_rows(const Tensor& rows, GroupedGemm::Splits splits) {
  std::vector<Tensor> parts;
  parts.reserve(splits.size());
  int64_t begin = 0;
  for (const int64_t count : splits) {
    TE_FL_ASSIGN_OR_RETURN(Tensor part, rows.slice(0, begin, begin + count));
    parts.push_back(std::move(part));
    begin += count;
  }
  return parts;
}

// Blocks for the FP8 copies of `rows` rows of `columns` elements in parts. The scales of blocks
// take a 32nd of the codes' bytes, and each part begins at a multiple of 256 bytes.
// `transposed`: the copies include column-wise data.
core::SharedBlocks blocks_of(const Device& device, int64_t rows, int64_t columns, size_t parts,
                             bool transposed) {
  const int64_t codes = rows * columns, gaps = 256 * static_cast<int64_t>(parts);
  return {device, codes + gaps, (transposed ? codes : 0) + codes / 16 + 4 * gaps};
}

// Quantises the rows of all parts in one call.
Status quantise_parts(const Tensor& rows, const std::vector<Tensor>& parts, const Device& device) {
  if (rows.numel() == 0) return {};
  std::vector<const te_fl_tensor*> outputs(parts.begin(), parts.end());
  te_fl_split_quantize_args args{};
  args.input = rows;
  args.outputs = outputs.data();
  args.outputs_count = static_cast<int64_t>(outputs.size());
  return ops::split_quantize(args, call_options(device));
}

// Quantises a list of separate tensors in one call.
Status quantise_all(const GemmUnit::Pending& pending, const Device& device) {
  if (pending.empty()) return {};
  std::vector<const te_fl_tensor*> inputs, outputs;
  for (const auto& [values, codes] : pending) {
    inputs.push_back(values);
    outputs.push_back(codes);
  }
  te_fl_multi_tensor_quantize_args args{};
  args.inputs = inputs.data();
  args.inputs_count = static_cast<int64_t>(inputs.size());
  args.outputs = outputs.data();
  args.outputs_count = static_cast<int64_t>(outputs.size());
  return ops::multi_tensor_quantize(args, call_options(device));
}

// The list of one member of all products; empty if the first product does not have the member.
class Members {
 public:
  Members(const std::vector<Product>& products, const te_fl_tensor* Product::*member) {
    if (products.front().*member == nullptr) return;
    for (const Product& p : products) list_.push_back(p.*member);
  }
  void into(const te_fl_tensor* const*& list, int64_t& count) const {
    list = list_.empty() ? nullptr : list_.data();
    count = static_cast<int64_t>(list_.size());
  }

 private:
  std::vector<const te_fl_tensor*> list_;
};

// Runs all GEMMs in one call. Their arguments are equal apart from the tensors.
Status multiply(const std::vector<Product>& products, const Device& device) {
  const Members a(products, &Product::a), b(products, &Product::b), d(products, &Product::d),
      bias(products, &Product::bias), bias_grad(products, &Product::bias_grad);
  te_fl_grouped_gemm_args args{};
  a.into(args.a, args.a_count);
  b.into(args.b, args.b_count);
  d.into(args.d, args.d_count);
  bias.into(args.bias, args.bias_count);
  bias_grad.into(args.bias_grad, args.bias_grad_count);
  const Product& first = products.front();
  args.trans_a = first.trans_a;
  args.trans_b = first.trans_b;
  args.accumulate = first.accumulate;
  args.accumulate_bias_grad = first.accumulate_bias_grad;
  args.use_split_accumulator = first.use_split_accumulator;
  return ops::grouped_gemm(args, call_options(device));
}

const char* first_byte(const te_fl_tensor& t) {
  return static_cast<const char*>(t.dl.data) + t.dl.byte_offset;
}

bool alike(const Product& a, const Product& b) {
  return a.accumulate == b.accumulate && a.accumulate_bias_grad == b.accumulate_bias_grad &&
         (a.bias_grad == nullptr) == (b.bias_grad == nullptr);
}

}  // namespace

Status GroupedGemm::group_weights(const char* module) {
  std::vector<std::shared_ptr<Parameter>> parts;
  for (const auto& unit : units_) parts.push_back(unit->weight());
  TE_FL_ASSIGN_OR_RETURN(weight_, GroupedParameter::create(module, std::move(parts)));
  return {};
}

Status GroupedGemm::group_biases(const char* module) {
  if (units_.front()->bias() == nullptr) return {};
  std::vector<std::shared_ptr<Parameter>> parts;
  for (const auto& unit : units_) parts.push_back(unit->bias());
  TE_FL_ASSIGN_OR_RETURN(bias_, GroupedParameter::create(module, std::move(parts)));
  return {};
}

Status GroupedGemm::spread() {
  if (weight_ != nullptr) TE_FL_RETURN_IF_ERROR(weight_->spread());
  if (bias_ != nullptr) TE_FL_RETURN_IF_ERROR(bias_->spread());
  return {};
}

void GroupedGemm::drop_inputs(Uses& uses) {
  for (GemmUnit::Use& use : uses) {
    if (!use.mode.fp8) use.input = Tensor();
  }
}

Status GroupedGemm::give_inputs(Uses& uses, Splits splits,
                                const std::function<Result<Tensor>()>& make) const {
  const auto reads = [&](size_t i) {
    return units_[i]->wants_wgrad(uses[i]) && !uses[i].input.defined();
  };
  bool any = false;
  for (size_t i = 0; i < units_.size(); ++i) any = any || reads(i);
  if (!any) return {};
  TE_FL_ASSIGN_OR_RETURN(const Tensor made, make());
  TE_FL_ASSIGN_OR_RETURN(const Tensor rows, cast(made, spec().activation_dtype));
  TE_FL_ASSIGN_OR_RETURN(const std::vector<Tensor> parts, split_rows(rows, splits));
  for (size_t i = 0; i < units_.size(); ++i) {
    if (reads(i)) uses[i].input = parts[i];
  }
  return {};
}

Result<std::vector<Tensor>> GroupedGemm::inputs(Uses& uses, const Tensor& x, Splits splits) {
  for (GemmUnit::Use& use : uses) use.dx_dtype = x.dtype();
  if (!uses.front().mode.fp8) {
    TE_FL_ASSIGN_OR_RETURN(const Tensor rows, cast(x, spec().activation_dtype));
    return split_rows(rows, splits);
  }
  const Fp8Mode& mode = uses.front().mode;
  const bool one_call =
      mode.custom() == nullptr && mode.backward() != BackwardOverride::kHighPrecision;
  std::vector<Tensor> parts;
  parts.reserve(units_.size());
  if (!one_call) {
    TE_FL_ASSIGN_OR_RETURN(const std::vector<Tensor> rows, split_rows(x, splits));
    for (size_t i = 0; i < units_.size(); ++i) {
      TE_FL_ASSIGN_OR_RETURN(Tensor part, units_[i]->whole_input(uses[i], rows[i]));
      parts.push_back(std::move(part));
    }
    return parts;
  }
  const core::SharedBlocks blocks = blocks_of(spec().device, x.size(0), spec().in, units_.size(),
                                              std::ranges::any_of(uses, &GemmUnit::Use::wgrad));
  for (size_t i = 0; i < units_.size(); ++i) {
    TE_FL_ASSIGN_OR_RETURN(Tensor part, units_[i]->input_codes(uses[i], splits[i]));
    parts.push_back(std::move(part));
  }
  TE_FL_RETURN_IF_ERROR(quantise_parts(x, parts, spec().device));
  return parts;
}

Result<Tensor> GroupedGemm::forward(Uses& uses, const Tensor& x, Splits splits,
                                    const ForwardOptions& options, bool training,
                                    const Tensor& into, const Tensor& input_grad) {
  uses.clear();
  TE_FL_RETURN_IF_ERROR(spread());
  for (const auto& unit : units_) {
    TE_FL_ASSIGN_OR_RETURN(GemmUnit::Use use, unit->begin(training));
    uses.push_back(std::move(use));
  }
  TE_FL_ASSIGN_OR_RETURN(const std::vector<Tensor> in, inputs(uses, x, splits));
  for (size_t i = 0; i < units_.size(); ++i) {
    TE_FL_RETURN_IF_ERROR(
        check_apart(into, in[i], "GroupedLinear: the memory for the output", "x"));
    if (!uses[i].wgrad) continue;
    TE_FL_RETURN_IF_ERROR(
        check_apart(input_grad, in[i], "GroupedLinear: the memory for the gradient of x", "x"));
  }
  Tensor y = into;
  if (!y.defined()) {
    TE_FL_ASSIGN_OR_RETURN(
        y, Tensor::empty({x.size(0), spec().out}, spec().activation_dtype, spec().device));
  }
  TE_FL_ASSIGN_OR_RETURN(const std::vector<Tensor> out, split_rows(y, splits));
  std::vector<GemmUnit::Weight> weights(units_.size());
  TE_FL_ASSIGN_OR_RETURN(std::vector<Product> all, products(uses, in, options, weights));
  for (size_t i = 0; i < units_.size(); ++i) all[i].d = out[i];
  TE_FL_RETURN_IF_ERROR(multiply(all, spec().device));
  for (size_t i = 0; i < units_.size(); ++i) units_[i]->keep(uses[i], in[i], weights[i]);
  return y;
}

Result<std::vector<Product>> GroupedGemm::products(const Uses& uses,
                                                   const std::vector<Tensor>& inputs,
                                                   const ForwardOptions& options,
                                                   std::vector<GemmUnit::Weight>& weights) {
  GemmUnit::Pending pending;
  std::vector<Product> all;
  Status status;
  for (size_t i = 0; i < units_.size() && status.ok(); ++i) {
    units_[i]->leave_quantising(&pending);
    Result<Product> product = units_[i]->product(uses[i], inputs[i], options, weights[i]);
    units_[i]->leave_quantising(nullptr);
    status = product.status();
    if (status.ok()) all.push_back(*product);
  }
  if (status.ok()) status = quantise_all(pending, spec().device);
  if (status.ok()) return all;
  for (const auto& unit : units_) unit->forget_weights();  // some have not been quantised
  return status;
}

Result<GroupedGemm::Gradients> GroupedGemm::gradients(const Uses& uses, const Tensor& dy,
                                                      Splits splits) {
  Gradients grads;
  const auto wants_bias = [](const auto& unit) { return unit->wants_bias_grad(); };
  const Fp8Mode& mode = uses.front().mode;
  const bool quantises = mode.quantises_gradients();
  const bool with_bias = std::ranges::any_of(units_, wants_bias);
  if (!quantises || mode.custom() != nullptr || with_bias) {
    // Each unit's quantisation also computes its bias gradient.
    const bool sums = bias_ != nullptr && quantises && with_bias;
    if (sums) TE_FL_RETURN_IF_ERROR(bias_->open_grad());
    Tensor rows = dy;
    if (!quantises) {
      TE_FL_ASSIGN_OR_RETURN(rows, cast(dy, spec().activation_dtype));
    }
    TE_FL_ASSIGN_OR_RETURN(const std::vector<Tensor> parts, split_rows(rows, splits));
    for (size_t i = 0; i < units_.size(); ++i) {
      TE_FL_ASSIGN_OR_RETURN(GemmUnit::Gradient grad, units_[i]->prepare_grad(uses[i], parts[i]));
      grads.push_back(std::move(grad));
    }
    if (sums) bias_->close_grad();
    return grads;
  }
  const core::SharedBlocks blocks = blocks_of(spec().device, dy.size(0), spec().out, units_.size(),
                                              std::ranges::any_of(uses, &GemmUnit::Use::wgrad));
  std::vector<Tensor> parts;
  for (size_t i = 0; i < units_.size(); ++i) {
    TE_FL_ASSIGN_OR_RETURN(Tensor part, units_[i]->grad_buffer(uses[i], splits[i]));
    parts.push_back(part);
    grads.push_back({.tensor = std::move(part), .bias_done = true});
  }
  TE_FL_RETURN_IF_ERROR(quantise_parts(dy, parts, spec().device));
  return grads;
}

Result<Tensor> GroupedGemm::dgrad(const Uses& uses, const Gradients& grads, Splits splits,
                                  int64_t rows, const Tensor& into) {
  Tensor dx = into;
  if (!dx.defined()) {
    TE_FL_ASSIGN_OR_RETURN(dx,
                           Tensor::empty({rows, spec().in}, uses.front().dx_dtype, spec().device));
  }
  TE_FL_ASSIGN_OR_RETURN(const std::vector<Tensor> parts, split_rows(dx, splits));
  std::vector<Product> products;
  for (size_t i = 0; i < units_.size(); ++i) {
    products.push_back(units_[i]->dgrad_product(uses[i], grads[i].tensor));
    products.back().d = parts[i];
  }
  TE_FL_RETURN_IF_ERROR(multiply(products, spec().device));
  return dx;
}

Status GroupedGemm::run_wgrad(const Uses& uses, const Gradients& grads) {
  bool writes_bias = false;
  for (size_t i = 0; i < units_.size(); ++i) {
    writes_bias = writes_bias || (!grads[i].bias_done && units_[i]->wants_bias_grad());
  }
  if (weight_ != nullptr) TE_FL_RETURN_IF_ERROR(weight_->open_grad());
  if (bias_ != nullptr && writes_bias) TE_FL_RETURN_IF_ERROR(bias_->open_grad());
  std::vector<std::pair<size_t, Product>> left;
  for (size_t i = 0; i < units_.size(); ++i) {
    TE_FL_ASSIGN_OR_RETURN(const auto product,
                           units_[i]->wgrad_product(uses[i], grads[i], uses[i].input));
    if (product.has_value()) left.emplace_back(i, *product);
  }
  const bool writes_weight = !left.empty();
  TE_FL_RETURN_IF_ERROR(multiply_wgrad(std::move(left)));
  if (weight_ != nullptr && writes_weight) weight_->close_grad();
  if (bias_ != nullptr && writes_bias) bias_->close_grad();
  return {};
}

Status GroupedGemm::multiply_wgrad(std::vector<std::pair<size_t, Product>> left) {
  // Computes all weight gradients in one call, except in two cases: some gradients exist and others
  // do not, or units share a gradient, since the GEMMs of one call run in no particular order.
  while (!left.empty()) {
    const Product first = left.front().second;
    std::set<const char*> written;
    std::vector<std::pair<size_t, Product>> now, later;
    for (auto& one : left) {
      const bool joins =
          alike(one.second, first) && written.insert(first_byte(*one.second.d)).second;
      (joins ? now : later).push_back(std::move(one));
    }
    std::vector<Product> products;
    for (const auto& one : now) products.push_back(one.second);
    TE_FL_RETURN_IF_ERROR(multiply(products, spec().device));
    for (const auto& [unit, product] : now) units_[unit]->wrote_wgrad(product);
    left = std::move(later);
  }
  return {};
}

Status GroupedGemm::wgrad(const Uses& uses, const Gradients& grads) {
  if (!delayed_->enabled()) return run_wgrad(uses, grads);
  Uses read = uses;
  Gradients kept = grads;
  std::vector<DelayedCount> counts;
  for (size_t i = 0; i < units_.size(); ++i) {
    read[i].weight = Tensor();
    units_[i]->settle(read[i], kept[i]);
    units_[i]->count_left(read[i], kept[i], counts);
  }
  auto left = std::make_shared<LeftGradients>(std::move(counts));
  delayed_->add([this, read = std::move(read), kept = std::move(kept), left] {
    left->end();
    return run_wgrad(read, kept);
  });
  return {};
}

Result<Tensor> GroupedGemm::backward(Uses& uses, const Tensor& dy, Splits splits, bool wants_dgrad,
                                     const Tensor& into) {
  TE_FL_RETURN_IF_ERROR(spread());
  for (size_t i = 0; i < units_.size(); ++i) {
    TE_FL_RETURN_IF_ERROR(units_[i]->check_unchanged(uses[i]));
    TE_FL_RETURN_IF_ERROR(units_[i]->check_result(
        uses[i], dy, into, "GroupedLinear: the memory for the gradient of x"));
    TE_FL_RETURN_IF_ERROR(units_[i]->read_kept(uses[i]));
  }
  TE_FL_ASSIGN_OR_RETURN(const Gradients grads, gradients(uses, dy, splits));
  Tensor dx;
  if (wants_dgrad || into.defined()) {
    TE_FL_ASSIGN_OR_RETURN(dx, dgrad(uses, grads, splits, dy.size(0), into));
  }
  TE_FL_RETURN_IF_ERROR(wgrad(uses, grads));
  return dx;
}

}  // namespace te_fl::nn::detail
