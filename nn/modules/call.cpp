#include "te_fl/nn/modules/call.hpp"

#include <array>
#include <utility>

namespace te_fl::nn {

namespace {

// The first value that holds an error; the first value if none does.
const Value& first_error(std::initializer_list<const Value*> values) {
  for (const Value* value : values) {
    if (!value->ok()) return *value;
  }
  return **values.begin();
}

std::vector<std::shared_ptr<Parameter>> trainable(const Module& module) {
  std::vector<std::shared_ptr<Parameter>> result;
  for (NamedParameter& p : module.parameters()) {
    if (p.parameter->requires_grad) result.push_back(std::move(p.parameter));
  }
  return result;
}

using Run = std::function<Result<Tape::Recorded>(bool training)>;

// Records a call of `module` with one result, and the trained parameters that it uses.
Value record_call(Tape& tape, std::span<const Value> inputs, const Module& module, const Run& run) {
  const Run with_parameters = [&](bool training) -> Result<Tape::Recorded> {
    TE_FL_ASSIGN_OR_RETURN(Tape::Recorded recorded, run(training));
    recorded.parameters = trainable(module);
    return recorded;
  };
  return tape.record(inputs, 1, with_parameters)[0];
}

}  // namespace

namespace detail {

Value call_module(const Module& module, const Value& x, const Forward& forward, Back backward) {
  if (x.tape() == nullptr) return x;
  const auto run = [&](bool training) -> Result<Tape::Recorded> {
    auto ctx = training ? std::make_shared<Ctx>() : nullptr;
    if (ctx != nullptr) ctx->input_grad = x.wants_grad();
    TE_FL_ASSIGN_OR_RETURN(Tensor y, forward(x.tensor(), ctx.get()));
    return Tape::Recorded{{std::move(y)},
                          [ctx, backward](const Tape::Tensors& dys) -> Result<Tape::Tensors> {
                            TE_FL_ASSIGN_OR_RETURN(Tensor dx, backward(dys[0], *ctx));
                            return Tape::Tensors{std::move(dx)};
                          }};
  };
  return record_call(*x.tape(), {&x, 1}, module, run);
}

}  // namespace detail

Value call(DotProductAttention& attention, const Value& q, const Value& k, const Value& v,
           const AttentionInputs& inputs) {
  const Value& first = first_error({&q, &k, &v});
  if (!first.ok()) return first;
  const std::array<Value, 3> operands = {q, k, v};
  return record_call(*q.tape(), operands, attention, [&](bool training) -> Result<Tape::Recorded> {
    auto ctx = training ? std::make_shared<Ctx>() : nullptr;
    TE_FL_ASSIGN_OR_RETURN(
        Tensor o, attention.forward(q.tensor(), k.tensor(), v.tensor(), ctx.get(), inputs));
    return Tape::Recorded{{std::move(o)},
                          [ctx, &attention](const Tape::Tensors& dys) -> Result<Tape::Tensors> {
                            TE_FL_ASSIGN_OR_RETURN(auto grads, attention.backward(dys[0], *ctx));
                            return Tape::Tensors{grads.dq, grads.dk, grads.dv};
                          }};
  });
}

Value call(MultiheadAttention& attention, const Value& x, const Value& encoder,
           const AttentionInputs& inputs) {
  const Value& first = first_error({&x, &encoder});
  if (!first.ok()) return first;
  const std::array<Value, 2> operands = {x, encoder};
  return record_call(*x.tape(), operands, attention, [&](bool training) -> Result<Tape::Recorded> {
    auto ctx = training ? std::make_shared<Ctx>() : nullptr;
    AttentionInputs all = inputs;
    all.encoder_output = encoder.tensor();
    TE_FL_ASSIGN_OR_RETURN(Tensor y,
                           attention.forward(x.tensor(), ctx.get(), all, x.tape()->options));
    return Tape::Recorded{
        {std::move(y)}, [ctx, &attention](const Tape::Tensors& dys) -> Result<Tape::Tensors> {
          Tensor d_encoder;
          TE_FL_ASSIGN_OR_RETURN(
              Tensor dx, attention.backward(dys[0], *ctx, nullptr, nullptr, nullptr, &d_encoder));
          return Tape::Tensors{std::move(dx), std::move(d_encoder)};
        }};
  });
}

Value call(TransformerLayer& decoder, const Value& x, const Value& encoder,
           const AttentionInputs& inputs, const AttentionInputs& cross) {
  const Value& first = first_error({&x, &encoder});
  if (!first.ok()) return first;
  const std::array<Value, 2> operands = {x, encoder};
  return record_call(*x.tape(), operands, decoder, [&](bool training) -> Result<Tape::Recorded> {
    auto ctx = training ? std::make_shared<Ctx>() : nullptr;
    AttentionInputs all = cross;
    all.encoder_output = encoder.tensor();
    TE_FL_ASSIGN_OR_RETURN(Tensor y,
                           decoder.forward(x.tensor(), ctx.get(), inputs, x.tape()->options, &all));
    return Tape::Recorded{
        {std::move(y)}, [ctx, &decoder](const Tape::Tensors& dys) -> Result<Tape::Tensors> {
          Tensor d_encoder;
          TE_FL_ASSIGN_OR_RETURN(Tensor dx, decoder.backward(dys[0], *ctx, nullptr, &d_encoder));
          return Tape::Tensors{std::move(dx), std::move(d_encoder)};
        }};
  });
}

Value call(Residual& residual, const Value& a, const Value& b) {
  const Value& first = first_error({&a, &b});
  if (!first.ok()) return first;
  const std::array<Value, 2> inputs = {a, b};
  return record_call(*a.tape(), inputs, residual, [&](bool training) -> Result<Tape::Recorded> {
    auto ctx = training ? std::make_shared<Ctx>() : nullptr;
    TE_FL_ASSIGN_OR_RETURN(Tensor y, residual.forward(a.tensor(), b.tensor(), ctx.get()));
    return Tape::Recorded{{std::move(y)},
                          [ctx, &residual](const Tape::Tensors& dys) -> Result<Tape::Tensors> {
                            TE_FL_ASSIGN_OR_RETURN(Tensor db, residual.backward(dys[0], *ctx));
                            return Tape::Tensors{dys[0], std::move(db)};
                          }};
  });
}

Value call(Tape& tape, Embedding& embedding, const Tensor& indices) {
  return record_call(tape, {}, embedding, [&](bool training) -> Result<Tape::Recorded> {
    auto ctx = training ? std::make_shared<Ctx>() : nullptr;
    TE_FL_ASSIGN_OR_RETURN(Tensor y, embedding.forward(indices, ctx.get()));
    return Tape::Recorded{{std::move(y)},
                          [ctx, &embedding](const Tape::Tensors& dys) -> Result<Tape::Tensors> {
                            TE_FL_RETURN_IF_ERROR(embedding.backward(dys[0], *ctx));
                            return Tape::Tensors{};
                          }};
  });
}

Value cross_entropy(const Value& logits, const Tensor& targets, const CrossEntropyOptions& options,
                    double divisor) {
  if (!logits.ok()) return logits;
  return logits.tape()->record({&logits, 1}, 1, [&](bool training) -> Result<Tape::Recorded> {
    auto ctx = training ? std::make_shared<Ctx>() : nullptr;
    auto loss = std::make_shared<CrossEntropyLoss>(options);
    TE_FL_ASSIGN_OR_RETURN(Tensor y, loss->forward(logits.tensor(), targets, ctx.get(), divisor));
    return Tape::Recorded{{std::move(y)},
                          [ctx, loss](const Tape::Tensors& dys) -> Result<Tape::Tensors> {
                            TE_FL_ASSIGN_OR_RETURN(Tensor dx, loss->backward(*ctx, dys[0]));
                            return Tape::Tensors{std::move(dx)};
                          }};
  })[0];
}

}  // namespace te_fl::nn
