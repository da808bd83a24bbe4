#include <utility>

#include "nn/autograd/ctx.hpp"
#include "nn/base/tensor_ops.hpp"
#include "te_fl/nn/modules/layer.hpp"

namespace te_fl::nn {
namespace {

struct SequentialRecord : Ctx::Record {
  std::vector<Ctx> parts;
  void visit_tensors(const Ctx::Visitor& visitor) {
    for (Ctx& part : parts) part.visit(visitor);
  }
};

}  // namespace

Sequential::Sequential() = default;
Sequential::~Sequential() = default;

Sequential& Sequential::append(std::string name, std::shared_ptr<Module> module, Calls calls) {
  if (name.empty()) name = std::to_string(entries_.size());
  register_module(std::move(name), *module);
  entries_.push_back({std::move(module), std::move(calls)});
  return *this;
}

Sequential& Sequential::fail(const Status& status) {
  if (status_.ok()) {
    status_ = status.wrap("Sequential: layer " + std::to_string(entries_.size()));
  }
  return *this;
}

Result<Tensor> Sequential::forward(const Tensor& x, Ctx* ctx, const ForwardOptions& options) {
  TE_FL_RETURN_IF_ERROR(status_);
  TE_FL_ASSIGN_OR_RETURN(auto record, detail::new_record<SequentialRecord>(ctx, "Sequential"));
  record->parts.resize(entries_.size());
  Tensor y = x;
  for (size_t i = 0; i < entries_.size(); ++i) {
    Ctx* part = ctx == nullptr ? nullptr : &record->parts[i];
    TE_FL_ASSIGN_OR_RETURN(y, entries_[i].calls.forward(y, part, options));
  }
  if (ctx != nullptr) TE_FL_RETURN_IF_ERROR(ctx->store(this, std::move(record)));
  return y;
}

Result<Tensor> Sequential::backward(const Tensor& dy, Ctx& ctx) {
  TE_FL_ASSIGN_OR_RETURN(auto taken, ctx.take(this, "Sequential"));
  auto& record = static_cast<SequentialRecord&>(*taken);
  Tensor gradient = dy;
  if (!record.parts.empty()) record.parts.front().input_grad = ctx.input_grad;
  for (size_t i = entries_.size(); i-- > 0;) {
    TE_FL_ASSIGN_OR_RETURN(gradient, entries_[i].calls.backward(gradient, record.parts[i]));
    record.parts[i].reset();
  }
  return gradient;
}

Value Sequential::operator()(const Value& x) const {
  if (!status_.ok()) return x.ok() ? x.tape()->error(status_) : x;
  Value y = x;
  for (const Entry& entry : entries_) y = entry.calls.on_tape(y);
  return y;
}

}  // namespace te_fl::nn
