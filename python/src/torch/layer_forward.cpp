#include <array>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "autograd/layer_call.hpp"
#include "ops/policy.hpp"
#include "py/errors.hpp"
#include "py/framework_tensor.hpp"
#include "te_fl/nn/autograd/context.hpp"
#include "torch/arguments.hpp"
#include "torch/layer.hpp"
#include "torch/layer_object.hpp"
#include "torch/layer_parameters.hpp"
#include "torch/layer_record.hpp"
#include "torch/recompute.hpp"
#include "torch/result_tensors.hpp"

namespace te_fl::python {

namespace {

using layer_call::ForwardArgument;

// Wraps an input. In training the forward saves it for the backward and records it in `lent`.
Tensor read_input(PyObject* object, const char* name, bool training, std::vector<Lent>& lent) {
  return training ? to_tensor(object, name, lent) : to_tensor(object, name, false);
}

void set_field(nn::AttentionInputs& in, std::string_view name, PyObject* value, bool training,
               std::vector<Lent>& lent) {
  struct Field {
    const char* name;
    Tensor nn::AttentionInputs::*tensor;
  };
  static constexpr Field fields[] = {
      {"attn_mask", &nn::AttentionInputs::attn_mask},
      {"bias", &nn::AttentionInputs::bias},
      {"alibi_slopes", &nn::AttentionInputs::alibi_slopes},
      {"cu_seqlens_q", &nn::AttentionInputs::cu_seqlens_q},
      {"cu_seqlens_kv", &nn::AttentionInputs::cu_seqlens_kv},
      {"cu_seqlens_q_padded", &nn::AttentionInputs::cu_seqlens_q_padded},
      {"cu_seqlens_kv_padded", &nn::AttentionInputs::cu_seqlens_kv_padded},
      {"rotary_angles", &nn::AttentionInputs::rotary_angles},
      {"rotary_start_positions", &nn::AttentionInputs::rotary_start_positions},
  };
  for (const Field& field : fields) {
    if (field.name != name) continue;
    in.*field.tensor = read_input(value, field.name, training, lent);
    return;
  }
  if (name == "max_seqlen_q") {
    in.max_seqlen_q = to_integer(value);
  } else if (name == "max_seqlen_kv") {
    in.max_seqlen_kv = to_integer(value);
  } else {
    throw_type_error("attention has no input '" + std::string(name) + "'");
  }
}

nn::AttentionInputs read_attention(PyObject* dict, bool training, std::vector<Lent>& lent) {
  nn::AttentionInputs inputs;
  if (dict == Py_None) return inputs;
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value) != 0;) {
    if (value == Py_None) continue;
    set_field(inputs, to_text(key, "an input's name"), value, training, lent);
  }
  return inputs;
}

nn::ForwardOptions read_microbatch(PyObject* value) {
  nn::ForwardOptions options;
  if (value == Py_True || value == Py_False) {
    options.is_first_microbatch = value == Py_True;
  } else if (value != Py_None) {
    options.reuse_weights = to_tensor(value, "is_first_microbatch", true);
  }
  return options;
}

// Converts `random`, an int64 [2] tensor with a generator's seed and offset, to a context.
Result<nn::Context> make_context(const Tensor& random) {
  if (random.dtype() != DType::kI64 || random.numel() != 2) {
    return Status(StatusCode::kInvalidArgument,
                  "random is " + random.describe() + "; it must be int64 [2]");
  }
  auto owner = std::make_shared<Tensor>(random);
  const std::array<int64_t, 1> two{2};
  TE_FL_ASSIGN_OR_RETURN(Tensor position, Tensor::wrap(owner->raw_data(), two, {}, DType::kU64,
                                                       random.device(), owner));
  return nn::Context::with_random(std::move(position));
}

// The parsed arguments of a forward.
struct Forward {
  std::vector<Tensor> inputs;
  std::vector<LentParameter> parameters;
  std::vector<uint64_t> numbers;
  std::vector<bool> trained;
  std::vector<Lent> lent;
  nn::AttentionInputs attention;
  nn::ForwardOptions options;
  size_t followed = 0;  // the number of inputs and extras
  Tensor random;
  DType activation = DType::kF32;
  void* stream = nullptr;
  long long mode = kTraining;
};

std::vector<std::pair<Shape, DType>> kinds_of(const Forward& f) {
  std::vector<std::pair<Shape, DType>> kinds;
  const auto add = [&](const Tensor& t) {
    kinds.emplace_back(Shape(t.shape().begin(), t.shape().end()), t.dtype());
  };
  for (const Tensor& input : f.inputs) add(input);
  if (f.attention.bias.defined()) add(f.attention.bias);
  return kinds;
}

// The memory of the inputs after the first, in which results may be placed.
std::vector<std::pair<const void*, const void*>> input_memory(const Forward& f) {
  std::vector<std::pair<const void*, const void*>> memory;
  for (size_t i = 1; i < f.inputs.size(); ++i) {
    const auto* begin = static_cast<const char*>(f.inputs[i].raw_data());
    memory.emplace_back(begin, begin + bytes_for(f.inputs[i].dtype(), f.inputs[i].numel()));
  }
  return memory;
}

Result<Tensor> run(Layer& layer, Forward& f, ResultTensors& results,
                   std::shared_ptr<Record>& record) {
  const LayerLock lock(layer);
  TE_FL_ASSIGN_OR_RETURN(auto runner, runner_for(layer, f.activation));
  const bool training = f.mode == kTraining;
  TE_FL_RETURN_IF_ERROR(lend(*runner, f.parameters, f.numbers, training ? &f.trained : nullptr));
  std::optional<nn::ContextScope> random;
  if (f.random.defined()) {
    TE_FL_ASSIGN_OR_RETURN(nn::Context context, make_context(f.random));
    random.emplace(context.with_stream(f.inputs[0].device(), f.stream));
  }
  const StreamScope stream(f.inputs[0].device(), f.stream);
  // A forward with random numbers always runs in training mode: without saved state it would draw
  // no random numbers.
  const bool keeps = training || f.random.defined();
  nn::Ctx ctx;
  results.expect(runner->output_shape(f.inputs), f.activation);
  for (const auto& [begin, end] : input_memory(f)) results.permit(begin, end);
  const ResultScope framework(results);
  TE_FL_ASSIGN_OR_RETURN(Tensor y,
                         runner->forward(f.inputs, keeps ? &ctx : nullptr, f.attention, f.options));
  if (!training) return y;
  record = std::make_shared<Record>(Record{.layer = nullptr,
                                           .runner = std::move(runner),
                                           .ctx = std::move(ctx),
                                           .scopes = nn::CapturedContext::capture(),
                                           .numbers = std::move(f.numbers),
                                           .trained = std::move(f.trained),
                                           .lent = std::move(f.lent),
                                           .inputs = kinds_of(f),
                                           .followed = f.followed,
                                           .memory = input_memory(f),
                                           .device = f.inputs[0].device()});
  return y;
}

// A field of a LayerCall, borrowed.
PyObject* field(PyObject* call, layer_call::Field place) {
  PyObject* const value = PyTuple_GetItem(call, place);
  if (value == nullptr) throw PythonError();
  return value;
}

Forward read_forward(Layer& layer, PyObject* call, bool training,
                     std::span<PyObject* const> tensors) {
  const long long inputs = to_integer(field(call, layer_call::kInputs));
  const long long extras = to_integer(field(call, layer_call::kExtras));
  if (inputs < 1 || extras < 0 || inputs + extras > std::ssize(tensors)) {
    throw_type_error("the LayerCall has " + std::to_string(inputs) + " inputs and " +
                     std::to_string(extras) + " extras, which must be among the " +
                     std::to_string(tensors.size()) + " tensors");
  }
  Forward f;
  f.followed = static_cast<size_t>(inputs + extras);
  for (PyObject* input : tensors.first(static_cast<size_t>(inputs))) {
    f.inputs.push_back(read_input(input, "input", training, f.lent));
  }
  const auto objects = tensors.subspan(f.followed);
  f.parameters = lend_parameters(layer, objects, training);
  f.mode = training ? kTraining : caching_mode(objects);
  f.options = read_microbatch(field(call, layer_call::kFirst));
  const bool reused = f.options.is_first_microbatch == false || f.options.reuse_weights.defined();
  Contents contents = number_contents(layer, objects, f.parameters, f.mode, reused);
  f.numbers = contents_in_segment(&layer, std::move(contents)).numbers;
  if (training) f.trained = find_trained(objects);
  f.attention = read_attention(field(call, layer_call::kAttention), training, f.lent);
  if (PyObject* const random = field(call, layer_call::kRandom); random != Py_None)
    f.random = to_tensor(random, "random", true);
  const long long activation = to_integer(field(call, layer_call::kActivation));
  f.activation = activation < 0 ? f.inputs[0].dtype() : static_cast<DType>(activation);
  f.stream = find_current_stream(tensors[0], f.inputs[0].device());
  return f;
}

// Returns (output, token) as tensors of the framework of `like`.
Ref hand_out(Tensor output, std::shared_ptr<Record> record, ResultTensors& results,
             PyObject* like) {
  const Ref made = results.take(std::move(output), like);
  Ref token = Ref::share(Py_None);
  if (record != nullptr) {
    Record& kept = *record;
    // Also tracks the output's storage: attention's backward reads it, but the program may free it.
    if (const auto owner = results.kept(data_address(made.get(), "output")); !owner.expired()) {
      kept.output = lend_result(made.get(), owner, kept.lent);
    }
    token = number_tensor(add_record(std::move(record)), drop_record, like);
    kept.token = data_address(token.get(), "token");
  }
  return Ref::take(PyTuple_Pack(2, made.get(), token.get()));
}

}  // namespace

PyObject* layer_forward(PyObject*, PyObject* const* args, Py_ssize_t count) noexcept {
  return guarded([&] {
    check_least("layer_forward", count, ForwardArgument::kTensors + 1);
    PyObject *const call = args[ForwardArgument::kCall], *const like =
                                                             args[ForwardArgument::kTensors];
    const std::shared_ptr<Layer>& layer = unwrap_layer(field(call, layer_call::kLayer));
    Forward f = read_forward(*layer, call, args[ForwardArgument::kTraining] == Py_True,
                             {args + ForwardArgument::kTensors, args + count});
    ResultTensors results(like, f.inputs[0].device());
    const DeterministicScope deterministic;
    std::shared_ptr<Record> record;
    std::optional<Result<Tensor>> output;
    {
      const WithoutLock unlocked;
      output.emplace(run(*layer, f, results, record));
    }
    Tensor made = value_or_throw(*std::move(output));
    output.reset();
    if (record != nullptr) record->layer = layer;
    return hand_out(std::move(made), std::move(record), results, like);
  });
}

}  // namespace te_fl::python
