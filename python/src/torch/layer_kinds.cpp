#include "torch/layer_kinds.hpp"

#include <array>
#include <string>
#include <type_traits>

#include "py/errors.hpp"
#include "torch/layer_options.hpp"
#include "torch/process_group.hpp"

namespace te_fl::python {
namespace {

template <class T>
struct Word {
  std::string_view text;
  T value;
};

template <class T, size_t n>
T parse_word(std::string_view what, std::string_view text, const std::array<Word<T>, n>& words) {
  std::string known;
  for (const auto& word : words) {
    if (word.text == text) return word.value;
    known += (known.empty() ? "" : ", ") + std::string(word.text);
  }
  throw_invalid(std::string(what) + " is '" + std::string(text) + "'; it is one of " + known);
}

constexpr std::array<Word<nn::Layout>, 3> kLayouts{
    {{"sbhd", nn::Layout::kSBHD}, {"bshd", nn::Layout::kBSHD}, {"thd", nn::Layout::kTHD}}};
constexpr std::array<Word<nn::MaskType>, 7> kMasks{
    {{"no_mask", nn::MaskType::kNone},
     {"causal", nn::MaskType::kCausal},
     {"causal_bottom_right", nn::MaskType::kCausalBottomRight},
     {"padding", nn::MaskType::kPadding},
     {"padding_causal", nn::MaskType::kPaddingCausal},
     {"padding_causal_bottom_right", nn::MaskType::kPaddingCausalBottomRight},
     {"arbitrary", nn::MaskType::kArbitrary}}};
constexpr std::array<Word<nn::SoftmaxType>, 3> kSoftmaxes{
    {{"vanilla", nn::SoftmaxType::kVanilla},
     {"off-by-one", nn::SoftmaxType::kOffByOne},
     {"learnable", nn::SoftmaxType::kLearnable}}};
constexpr std::array<Word<nn::QkNorm>, 3> kQkNorms{{{"L2Normalization", nn::QkNorm::kL2},
                                                    {"RMSNorm", nn::QkNorm::kRMSNorm},
                                                    {"LayerNorm", nn::QkNorm::kLayerNorm}}};
constexpr std::array<Word<nn::Normalization>, 2> kNormalizations{
    {{"LayerNorm", nn::Normalization::kLayerNorm}, {"RMSNorm", nn::Normalization::kRMSNorm}}};
constexpr std::array<Word<nn::ScoreFunction>, 3> kScoreFunctions{
    {{"sigmoid", nn::ScoreFunction::kSigmoid},
     {"softmax", nn::ScoreFunction::kSoftmax},
     {"sqrtsoftplus", nn::ScoreFunction::kSqrtSoftplus}}};
constexpr std::array<Word<nn::ParallelMode>, 2> kModes{
    {{"column", nn::ParallelMode::kColumn}, {"row", nn::ParallelMode::kRow}}};
constexpr std::array<Word<DType>, 3> kDTypes{
    {{"f32", DType::kF32}, {"bf16", DType::kBF16}, {"f16", DType::kF16}}};

// Reads the fields of a dict; end() throws TypeError for fields that were never read.
class Fields {
 public:
  explicit Fields(PyObject* dict) : dict_(dict) {
    if (!PyDict_Check(dict)) throw_type_error("the options of a layer must be a dict");
  }
  void operator()(const char* name, int64_t& field) {
    if (PyObject* value = find(name)) {
      field = PyLong_AsLongLong(value);
      if (PyErr_Occurred() != nullptr) throw PythonError();
    }
  }
  void operator()(const char* name, bool& field) {
    if (PyObject* value = find(name)) {
      const int truth = PyObject_IsTrue(value);
      check(truth);
      field = truth != 0;
    }
  }
  void operator()(const char* name, float& field) {
    if (PyObject* value = find(name)) {
      field = static_cast<float>(PyFloat_AsDouble(value));
      if (PyErr_Occurred() != nullptr) throw PythonError();
    }
  }
  void operator()(const char* name, std::shared_ptr<nn::SequenceRanks>& field) {
    if (PyObject* value = find(name)) field = make_sequence_ranks(value);
  }
  void operator()(const char* name, std::shared_ptr<nn::ExpertRanks>& field) {
    if (PyObject* value = find(name)) field = make_expert_ranks(value);
  }
  void operator()(const char* name, nn::ParallelMode& field) { word(name, field, kModes); }
  void operator()(const char* name, Device& field) {
    if (PyObject* value = find(name)) field = value_or_throw(parse_device(to_text(value, name)));
  }
  void operator()(const char* name, nn::Activation& field) {
    if (PyObject* value = find(name))
      field = value_or_throw(nn::parse_activation(to_text(value, name)));
  }
  void operator()(const char* name, std::vector<nn::ParameterPart>& field) {
    PyObject* value = find(name);
    if (value == nullptr) return;
    const Ref parts = Ref::take(PySequence_List(value));
    for (Py_ssize_t i = 0; i < PyList_Size(parts.get()); ++i) {
      PyObject* part = nullptr;
      long long rows = 0;
      if (PyArg_ParseTuple(PyList_GetItem(parts.get(), i), "OL", &part, &rows) == 0) {
        throw PythonError();
      }
      field.push_back({std::string(to_text(part, "a part's name")), rows});
    }
  }
  void operator()(const char* name, DType& field) { word(name, field, kDTypes); }
  void operator()(const char* name, nn::Layout& field) { word(name, field, kLayouts); }
  void operator()(const char* name, nn::MaskType& field) { word(name, field, kMasks); }
  void operator()(const char* name, nn::QkNorm& field) { word(name, field, kQkNorms); }
  void operator()(const char* name, nn::SoftmaxType& field) { word(name, field, kSoftmaxes); }
  void operator()(const char* name, nn::Normalization& field) {
    word(name, field, kNormalizations);
  }
  void operator()(const char* name, nn::ScoreFunction& field) {
    word(name, field, kScoreFunctions);
  }
  void end(std::string_view kind) const {
    if (PyDict_Size(dict_) == found_) return;
    PyObject *key = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(dict_, &at, &key, &value) != 0;) {
      const std::string_view name = to_text(key, "an option's name");
      bool known = false;
      for (const char* read : read_) known |= name == read;
      if (!known) {
        throw_type_error("a layer of kind " + std::string(kind) + " has no option '" +
                         std::string(name) + "'");
      }
    }
  }

 private:
  PyObject* find(const char* name) {
    read_.push_back(name);
    PyObject* value = PyDict_GetItemString(dict_, name);
    found_ += value != nullptr;
    return value;
  }
  template <class T, size_t n>
  void word(const char* name, T& field, const std::array<Word<T>, n>& words) {
    if (PyObject* value = find(name)) field = parse_word(name, to_text(value, name), words);
  }

  PyObject* dict_;
  Py_ssize_t found_ = 0;
  std::vector<const char*> read_;
};

// Calls a module. The primary template handles modules with one input and no attention.
template <class M>
struct ModuleCall {
  static Result<Tensor> forward(M& m, const std::vector<Tensor>& in, nn::Ctx* ctx,
                                const nn::AttentionInputs&, const nn::ForwardOptions& options) {
    if constexpr (std::is_base_of_v<nn::Norm, M>) {
      return m.forward(in[0], ctx);
    } else {
      return m.forward(in[0], ctx, options);
    }
  }
  static Result<std::vector<Tensor>> backward(M& m, const Tensor& dy, nn::Ctx& ctx) {
    TE_FL_ASSIGN_OR_RETURN(Tensor dx, m.backward(dy, ctx));
    return std::vector<Tensor>{std::move(dx)};
  }
};
// The second input holds the row count of each group, int64 on the host. Memory for the output and
// for the first input's gradient may follow; a tensor of shape [0] means none.
template <>
struct ModuleCall<nn::GroupedLinear> {
  static Result<Tensor> forward(nn::GroupedLinear& m, const std::vector<Tensor>& in, nn::Ctx* ctx,
                                const nn::AttentionInputs&, const nn::ForwardOptions& options) {
    const Tensor splits = in.size() > 1 ? in[1] : Tensor();
    if ((in.size() != 2 && in.size() != 4) || splits.dtype() != DType::kI64 ||
        !splits.device().is_host() || !splits.contiguous()) {
      return Status(StatusCode::kInvalidArgument,
                    "a grouped_linear takes x, the rows of each map, int64 on the host, and "
                    "memory for two results or none; there are " +
                        std::to_string(in.size()) + " inputs, the second " +
                        (splits.defined() ? splits.describe() : "missing"));
    }
    const auto* rows = static_cast<const int64_t*>(splits.raw_data());
    const auto memory = [&](size_t i) {
      return i < in.size() && in[i].rank() > 1 ? in[i] : Tensor();
    };
    return m.forward(in[0], {rows, static_cast<size_t>(splits.numel())}, ctx, options,
                     {.output = memory(2), .input_grad = memory(3)});
  }
  static Result<std::vector<Tensor>> backward(nn::GroupedLinear& m, const Tensor& dy,
                                              nn::Ctx& ctx) {
    TE_FL_ASSIGN_OR_RETURN(Tensor dx, m.backward(dy, ctx));
    return std::vector<Tensor>{std::move(dx), Tensor(), Tensor(), Tensor()};
  }
};
// Memory for MoEAuxiliary's tensors may follow x, in their order; a tensor of shape [0] means none.
template <>
struct ModuleCall<nn::MoELayer> {
  static Result<Tensor> forward(nn::MoELayer& m, const std::vector<Tensor>& in, nn::Ctx* ctx,
                                const nn::AttentionInputs&, const nn::ForwardOptions& options) {
    if (in.size() == 1) return m.forward(in[0], ctx, options);
    if (in.size() != 4) {
      return Status(StatusCode::kInvalidArgument,
                    "a moe_layer takes x, and memory for three tensors or none; there are " +
                        std::to_string(in.size()) + " inputs");
    }
    const auto memory = [&](size_t i) { return in[i].numel() > 0 ? in[i] : Tensor(); };
    nn::MoEAuxiliary auxiliary{
        .aux_loss = memory(1), .tokens_per_expert = memory(2), .aux_loss_grad = memory(3)};
    return m.forward(in[0], ctx, options, &auxiliary);
  }
  static Result<std::vector<Tensor>> backward(nn::MoELayer& m, const Tensor& dy, nn::Ctx& ctx) {
    TE_FL_ASSIGN_OR_RETURN(Tensor dx, m.backward(dy, ctx));
    return std::vector<Tensor>{std::move(dx), Tensor(), Tensor(), Tensor()};
  }
};
template <>
struct ModuleCall<nn::TransformerLayer> {
  static Result<Tensor> forward(nn::TransformerLayer& m, const std::vector<Tensor>& in,
                                nn::Ctx* ctx, const nn::AttentionInputs& attention,
                                const nn::ForwardOptions& options) {
    return m.forward(in[0], ctx, attention, options);
  }
  static Result<std::vector<Tensor>> backward(nn::TransformerLayer& m, const Tensor& dy,
                                              nn::Ctx& ctx) {
    Tensor dbias;
    TE_FL_ASSIGN_OR_RETURN(Tensor dx, m.backward(dy, ctx, &dbias));
    return std::vector<Tensor>{std::move(dx), std::move(dbias)};
  }
};
template <>
struct ModuleCall<nn::DotProductAttention> {
  static Result<Tensor> forward(nn::DotProductAttention& m, const std::vector<Tensor>& in,
                                nn::Ctx* ctx, const nn::AttentionInputs& attention,
                                const nn::ForwardOptions&) {
    return m.forward(in[0], in[1], in[2], ctx, attention);
  }
  static Result<std::vector<Tensor>> backward(nn::DotProductAttention& m, const Tensor& dy,
                                              nn::Ctx& ctx) {
    TE_FL_ASSIGN_OR_RETURN(auto g, m.backward(dy, ctx));
    return std::vector<Tensor>{std::move(g.dq), std::move(g.dk), std::move(g.dv),
                               std::move(g.dbias)};
  }
};

// The output's last extent; none if it equals the last input's last extent.
template <class Options>
std::optional<int64_t> find_width(const Options& options) {
  if constexpr (requires { options.out_features; }) return options.out_features;
  if constexpr (std::is_same_v<Options, nn::MoELayerOptions>) return options.hidden_size;
  return std::nullopt;
}

// Reads the ranks that shard the layer, if this kind of layer supports ranks, and the sharding
// options. Only a Transformer layer also uses ranks without sequence parallelism.
template <class Options>
void read_ranks(Fields& fields, Options& options) {
  constexpr bool linear = std::is_same_v<Options, nn::LinearOptions>;
  if constexpr (linear) fields("parallel_mode", options.parallel_mode);
  if constexpr (linear || std::is_same_v<Options, nn::LayerNormMLPOptions>) {
    fields("sequence_ranks", options.parallel.framework_ranks);
    options.parallel.sequence_parallel = options.parallel.framework_ranks != nullptr;
  }
  if constexpr (std::is_same_v<Options, nn::MoELayerOptions>) {
    fields("expert_ranks", options.framework_expert_ranks);
  }
  if constexpr (std::is_same_v<Options, nn::TransformerLayerOptions>) {
    fields("sequence_ranks", options.parallel.framework_ranks);
    fields("sequence_parallel", options.parallel.sequence_parallel);
  }
}

// The ratio of the output's rows to the input's rows: times / by.
struct Rows {
  int64_t times = 1, by = 1;
};
template <class Options>
Rows find_rows(const Options& options) {
  if constexpr (std::is_same_v<Options, nn::LinearOptions>) {
    const int size = options.parallel.divides_sequence() ? options.parallel.size() : 1;
    if (options.parallel_mode == nn::ParallelMode::kColumn) return {.times = size};
    if (options.parallel_mode == nn::ParallelMode::kRow) return {.by = size};
  }
  return {};
}

template <class M>
class RunnerOf final : public Runner {
 public:
  RunnerOf(std::unique_ptr<M> module, std::optional<int64_t> width, Rows rows)
      : module_(std::move(module)), width_(width), rows_(rows) {}
  nn::Module& module() override { return *module_; }
  Shape output_shape(const std::vector<Tensor>& inputs) const override {
    Shape shape(inputs.front().shape().begin(), inputs.front().shape().end());
    const auto last = inputs.back().shape();
    if (!shape.empty() && !last.empty()) shape.back() = width_.value_or(last.back());
    if (shape.size() > 1) shape.front() = shape.front() * rows_.times / rows_.by;
    return shape;
  }
  Result<Tensor> forward(const std::vector<Tensor>& inputs, nn::Ctx* ctx,
                         const nn::AttentionInputs& attention,
                         const nn::ForwardOptions& options) override {
    return ModuleCall<M>::forward(*module_, inputs, ctx, attention, options);
  }
  Result<std::vector<Tensor>> backward(const Tensor& dy, nn::Ctx& ctx) override {
    return ModuleCall<M>::backward(*module_, dy, ctx);
  }

 private:
  std::unique_ptr<M> module_;
  std::optional<int64_t> width_;
  Rows rows_;
};

template <class M, class Options>
MakeRunner make(std::string_view kind, PyObject* dict) {
  Options options;
  Fields fields(dict);
  read(fields, options);
  read_ranks(fields, options);
  fields.end(kind);
  return [options](DType activation_dtype) -> Result<std::unique_ptr<Runner>> {
    Options with = options;
    with.activation_dtype = activation_dtype;
    TE_FL_ASSIGN_OR_RETURN(auto module, M::create(with));
    return std::unique_ptr<Runner>(
        new RunnerOf<M>(std::move(module), find_width(with), find_rows(with)));
  };
}

}  // namespace

MakeRunner make_runner(std::string_view kind, PyObject* options) {
  using Make = MakeRunner (*)(std::string_view, PyObject*);
  static constexpr std::array<Word<Make>, 9> kinds{
      {{"linear", make<nn::Linear, nn::LinearOptions>},
       {"grouped_linear", make<nn::GroupedLinear, nn::GroupedLinearOptions>},
       {"moe_layer", make<nn::MoELayer, nn::MoELayerOptions>},
       {"layernorm_linear", make<nn::LayerNormLinear, nn::LayerNormLinearOptions>},
       {"layernorm_mlp", make<nn::LayerNormMLP, nn::LayerNormMLPOptions>},
       {"layernorm", make<nn::LayerNorm, nn::NormOptions>},
       {"rmsnorm", make<nn::RMSNorm, nn::NormOptions>},
       {"attention", make<nn::DotProductAttention, nn::DotProductAttentionOptions>},
       {"transformer_layer", make<nn::TransformerLayer, nn::TransformerLayerOptions>}}};
  return parse_word("the kind of layer", kind, kinds)(kind, options);
}

}  // namespace te_fl::python
