#include "te_fl/op_outputs.hpp"

#include <bit>
#include <utility>

#include "core/op/compiled_op.hpp"

namespace te_fl {

struct OutputRules::Impl {
  core::CompiledOp::Impl op;
};

namespace core {
namespace {

constexpr uint64_t kHighPrecision =
    TE_FL_BIT(TE_FL_F32) | TE_FL_BIT(TE_FL_F16) | TE_FL_BIT(TE_FL_BF16);

// For each name in an op's shape rules, the extent of a tensor that determines its value in a call.
class Origins {
 public:
  // Reads the tensors of the call except argument number `output`.
  Origins(const CompiledOp::Impl& op, const ArgsView& args, uint32_t output)
      : op_(op), args_(args) {
    for (const uint8_t i : op.tensors) {
      const te_fl_tensor* t = args.tensor(op.args[i]);
      if (i != output && t != nullptr) learn(i, t->dl.ndim);
    }
  }

  OutputForm form(uint32_t output) const {
    OutputForm form;
    form.dtype = dtype(output);
    const ShapeRule& rule = op_.args[output].shape;
    if (rule.any) return form;
    const Dims& dims = op_.rule_dims(rule, args_);
    if (dims.leading && leading_ < 0) return form;
    const int leading = dims.leading ? leading_count_ : 0;
    if (leading + dims.count > kMaxRank) return form;
    for (int d = 0; d < leading; ++d) form.extents[static_cast<size_t>(d)] = {leading_, d};
    for (int d = 0; d < dims.count; ++d) {
      const auto extent = extent_of(dims.terms[static_cast<size_t>(d)]);
      if (!extent) return form;
      form.extents[static_cast<size_t>(leading + d)] = *extent;
    }
    form.rank = leading + dims.count;
    return form;
  }

 private:
  // A tensor whose rank its rule does not allow determines nothing; the call is refused later.
  void learn(int arg, int rank) {
    const ShapeRule& rule = op_.args[static_cast<size_t>(arg)].shape;
    if (rule.any) return;
    const Dims& dims = op_.rule_dims(rule, args_);
    const int leading = rank - dims.count;
    if (leading < 0 || (!dims.leading && leading > 0)) return;
    if (dims.leading && leading_ < 0) {
      leading_ = arg;
      leading_count_ = leading;
      product_ = OutputExtent{arg, 0, leading};
    }
    for (int d = 0; d < dims.count; ++d) {
      const Term& term = dims.terms[static_cast<size_t>(d)];
      OutputExtent extent{arg, leading + d};
      if (term.kind == Term::kProduct) {
        // A quotient does not determine the product.
        if (!product_ && term.value == 1) product_ = extent;
        continue;
      }
      if (term.kind == Term::kTimes) extent.divisor = term.value;
      if (term.kind == Term::kPlus) extent.less = term.value;
      const bool names =
          term.kind == Term::kName || term.kind == Term::kTimes || term.kind == Term::kPlus;
      if (names && !names_[term.symbol]) names_[term.symbol] = extent;
    }
  }

  std::optional<OutputExtent> extent_of(const Term& term) const {
    std::optional<OutputExtent> extent;
    switch (term.kind) {
      case Term::kConst:
        return OutputExtent{.more = term.value};
      case Term::kCount:
        return OutputExtent{.more = args_.count(op_.args[term.symbol])};
      case Term::kName:
        return names_[term.symbol];
      case Term::kTimes:
        extent = names_[term.symbol];
        if (extent) extent->factor = term.value;
        return extent;
      case Term::kPlus:
        extent = names_[term.symbol];
        if (extent) extent->more = term.value;
        return extent;
      case Term::kProduct:
        extent = product_;
        if (extent) extent->divisor = term.value;
        return extent;
      default:
        return extent;
    }
  }

  std::optional<DType> dtype(uint32_t output) const {
    const Arg& arg = op_.args[output];
    if (std::popcount(arg.dtypes) == 1) return static_cast<DType>(std::countr_zero(arg.dtypes));
    const char* const model = op_.descs[output].same_as;
    const int named = model != nullptr ? op_.find_arg(model) : -1;
    if (named >= 0) {
      if (const auto found = dtype_in(static_cast<size_t>(named), arg.dtypes)) return found;
    }
    for (size_t i = 0; i < op_.args.size(); ++i) {
      if (op_.args[i].role != TE_FL_IN) continue;
      if (const auto found = dtype_in(i, arg.dtypes & kHighPrecision)) return found;
    }
    return std::nullopt;
  }
  // The dtype of the tensor in argument number `arg`, if it is in the mask.
  std::optional<DType> dtype_in(size_t arg, uint64_t mask) const {
    if (!op_.args[arg].is_tensor()) return std::nullopt;
    const te_fl_tensor* t = args_.tensor(op_.args[arg]);
    const int index = t != nullptr ? dtype_index(t->dl.dtype) : kInvalidDType;
    if (index == kInvalidDType || (mask >> index & 1) == 0) return std::nullopt;
    return static_cast<DType>(index);
  }

  const CompiledOp::Impl& op_;
  const ArgsView& args_;
  std::array<std::optional<OutputExtent>, kMaxSymbols> names_;
  std::optional<OutputExtent> product_;  // of the leading dimensions
  int leading_ = -1;  // the argument that determines the leading dimensions; -1: none
  int leading_count_ = 0;
};

}  // namespace
}  // namespace core

Result<std::unique_ptr<const OutputRules>> OutputRules::compile(const te_fl_op_schema& schema) {
  auto impl = std::make_unique<Impl>();
  TE_FL_RETURN_IF_ERROR(impl->op.compile(schema));
  return std::unique_ptr<const OutputRules>(new OutputRules(std::move(impl)));
}

OutputRules::OutputRules(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
OutputRules::~OutputRules() = default;

OutputForm OutputRules::form(const void* args, uint32_t output) const {
  const core::ArgsView view(args);
  return core::Origins(impl_->op, view, output).form(output);
}

int64_t OutputRules::value(const OutputExtent& extent, const void* args) const {
  if (extent.arg < 0) return extent.more;
  const core::ArgsView view(args);
  const te_fl_tensor* t = view.tensor(impl_->op.args[static_cast<size_t>(extent.arg)]);
  int64_t product = 1;
  for (int d = 0; d < extent.count; ++d) product *= t->dl.shape[extent.first + d];
  return extent.factor * core::rounded_up(product - extent.less, extent.divisor) + extent.more;
}

}  // namespace te_fl
