// C functions that bench_gpu.py calls through ctypes: ops by name with an argument struct that the
// caller fills, and a Transformer layer's training step, both on the caller's stream. The caller
// owns the ops' memory (device pointers). Functions return 0, or 1 with a message in tb_error().
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>

#include "core/op/op_table.hpp"
#include "te_fl/memory.hpp"
#include "te_fl/nn.hpp"
#include "te_fl/te_fl.hpp"

#define TB_EXPORT extern "C" __attribute__((visibility("default")))

namespace te_fl::bench {
namespace {

using nlohmann::json;
thread_local std::string tls_error;
thread_local std::string tls_text;

int report(const Status& status) {
  if (status.ok()) return 0;
  tls_error = status.to_string();
  return 1;
}
const char* text(std::string value) {
  tls_text = std::move(value);
  return tls_text.c_str();
}

// Returns nanoseconds per run over `count` runs, or a negative number if one fails.
template <class F>
double nanoseconds(int count, F&& f) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < count; ++i) {
    if (f() != 0) return -1;
  }
  const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - begin;
  return spent.count() / count;
}

const Device kDevice = {TE_FL_DEVICE_CUDA, 0};

struct Layer {
  std::unique_ptr<nn::TransformerLayer> layer;
  std::vector<nn::NamedParameter> parameters;
  std::optional<nn::Recipe> recipe;
  nn::AttentionInputs inputs;
  nn::ForwardOptions forward;
  int first_microbatches = 0;  // remaining steps that also quantise the weights for later steps
  Tensor x, dy;
  Tensor dx, y;  // of the last step
};

Result<Tensor> wrapped(const json& spec) {
  const auto shape = spec.at("shape").get<std::vector<int64_t>>();
  const std::string dtype = spec.at("dtype");
  void* data = reinterpret_cast<void*>(spec.at("data").get<uintptr_t>());
  return Tensor::wrap(data, shape, {}, dtype == "bf16" ? DType::kBF16 : DType::kF32, kDevice,
                      nullptr);
}

nn::TransformerLayerOptions read_options(const json& spec) {
  nn::TransformerLayerOptions o;
  o.hidden_size = spec.at("hidden");
  o.ffn_hidden_size = spec.at("ffn");
  o.num_attention_heads = spec.at("heads");
  o.num_gqa_groups = spec.value("groups", 0);
  if (spec.value("llama", false)) {
    o.normalization = nn::Normalization::kRMSNorm;
    o.activation = nn::Activation::kSwiglu;
    o.bias = false;
  }
  o.attention.layout = nn::Layout::kSBHD;
  o.attention.mask_type = spec.value("causal", false) ? nn::MaskType::kCausal : nn::MaskType::kNone;
  o.param_dtype = o.activation_dtype = DType::kBF16;
  o.device = kDevice;
  o.seed = 1;
  return o;
}

Result<std::unique_ptr<Layer>> open_layer(const json& spec) {
  auto result = std::make_unique<Layer>();
  TE_FL_ASSIGN_OR_RETURN(result->layer, nn::TransformerLayer::create(read_options(spec)));
  TE_FL_RETURN_IF_ERROR(result->layer->set_grad_dtype(DType::kBF16));
  result->parameters = result->layer->parameters();
  const std::string recipe = spec.at("recipe");
  if (recipe == "delayed+attention") {
    result->recipe = nn::DelayedScaling{.fp8_dpa = true};
  } else if (recipe != "none") {
    TE_FL_ASSIGN_OR_RETURN(result->recipe, nn::parse_recipe(recipe));
  }
  // The first two steps quantise the weights. The second step uses the scales that follow from the
  // first step's amaxes.
  if (spec.value("cached", false)) result->first_microbatches = 2;
  if (result->first_microbatches > 0) result->forward.is_first_microbatch = true;
  TE_FL_ASSIGN_OR_RETURN(result->x, wrapped(spec.at("x")));
  TE_FL_ASSIGN_OR_RETURN(result->dy, wrapped(spec.at("dy")));
  if (spec.contains("angles")) {
    TE_FL_ASSIGN_OR_RETURN(result->inputs.rotary_angles, wrapped(spec.at("angles")));
  }
  return result;
}

Status step(Layer& layer, void* stream) {
  nn::ContextScope scope(nn::Context::current().with_stream(stream));
  for (const nn::NamedParameter& p : layer.parameters) {
    TE_FL_RETURN_IF_ERROR(p.parameter->clear_grad());
  }
  nn::Ctx ctx;
  {
    nn::autocast fp8(layer.recipe.has_value(), layer.recipe.value_or(nn::DelayedScaling{}));
    TE_FL_ASSIGN_OR_RETURN(layer.y,
                           layer.layer->forward(layer.x, &ctx, layer.inputs, layer.forward));
    TE_FL_RETURN_IF_ERROR(fp8.exit());
  }
  TE_FL_ASSIGN_OR_RETURN(layer.dx, layer.layer->backward(layer.dy, ctx));
  TE_FL_RETURN_IF_ERROR(nn::backward_end());
  if (layer.first_microbatches > 0 && --layer.first_microbatches == 0) {
    layer.forward.is_first_microbatch = false;
  }
  return Status();
}

}  // namespace
}  // namespace te_fl::bench

using namespace te_fl;         // NOLINT: the C functions below are this file's interface
using namespace te_fl::bench;  // NOLINT

TB_EXPORT const char* tb_error() { return tls_error.c_str(); }

TB_EXPORT int tb_init(const char* plugin) {
  const auto loaded = plugins::load(plugin);
  // The process may have loaded the plugin already, as te_fl in Python does for
  // TE_FL_PLUGIN_MODULES.
  if (loaded.status().code() == StatusCode::kAlreadyExists) return report(Status());
  return report(loaded.ok() ? Status() : loaded.status());
}

// Returns the libraries that the plugin uses: [{"subject": "cuDNN", "state": "9.19.0,
// /path/of/libcudnn.so.9"}, ..].
TB_EXPORT const char* tb_findings() {
  const auto found = plugins::diagnose("cuda");
  if (!found.ok()) {
    report(found.status());
    return nullptr;
  }
  json result = json::array();
  for (const plugins::Finding& f : *found) {
    result.push_back({{"subject", f.subject}, {"state", f.state}});
  }
  return text(result.dump());
}

// Requires bitwise deterministic results from later calls of the process (1), or not (0).
TB_EXPORT int tb_deterministic(int on) {
  const auto policy = current_policy();
  if (!policy.ok()) return report(policy.status());
  PolicySettings settings = policy->settings();
  settings.deterministic = on != 0;
  set_global_policy(SelectionPolicy::intern(settings));
  return 0;
}

// Describes an op's argument struct: {"size": bytes, "args": {name: {"type", "offset",
// "count_offset"}}}
TB_EXPORT const char* tb_schema(const char* op) {
  for (const te_fl_op_schema* schema : core::catalogue()) {
    if (std::strcmp(schema->name, op) != 0) continue;
    json args = json::object();
    for (uint32_t i = 0; i < schema->arg_count; ++i) {
      const te_fl_arg_desc& a = *schema->args[i];
      args[a.name] = {{"type", a.type},
                      {"offset", a.offset},
                      {"count_offset", a.count_offset},
                      {"neutral", a.neutral}};
    }
    return text(json{{"size", schema->args_size}, {"args", args}}.dump());
  }
  tls_error = std::string("no op is named ") + op;
  return nullptr;
}

TB_EXPORT int tb_call(const char* op, const void* args, void* stream) {
  CallOptions options;
  options.stream = stream;
  options.rng.seed = 17;
  return report(OpManager::instance().call(std::string_view(op), args, options));
}

// Returns the host's nanoseconds per call over `count` calls; negative: see tb_error(). The
// device's queue must be able to hold them all.
TB_EXPORT double tb_time_calls(const char* op, const void* args, void* stream, int count) {
  CallOptions options;
  options.stream = stream;
  OpManager& manager = OpManager::instance();
  const auto id = manager.registry().find(op);
  if (!id.ok()) return -report(id.status());
  return nanoseconds(count, [&] { return report(manager.call(*id, args, options)); });
}
// Times direct calls of cuLaunchKernel or cublasLtMatmul through function pointers.
TB_EXPORT double tb_time_launch(void* launch, void* function, void** parameters, void* stream,
                                int count) {
  using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                         unsigned, void*, void**, void**);
  const auto call = reinterpret_cast<Launch>(launch);
  return nanoseconds(
      count, [&] { return call(function, 1, 1, 1, 256, 1, 1, 0, stream, parameters, nullptr); });
}
TB_EXPORT double tb_time_matmul(void* matmul, void** arguments, size_t workspace, void* stream,
                                int count) {
  using Matmul = int (*)(void*, void*, void*, void*, void*, void*, void*, void*, void*, void*,
                         void*, void*, void*, void*, size_t, void*);
  const auto call = reinterpret_cast<Matmul>(matmul);
  void** a = arguments;
  return nanoseconds(count, [&] {
    return call(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12],
                a[13], workspace, stream);
  });
}

// Returns the implementations that ran calls since the last reset: [{"op", "impl", "calls"}].
TB_EXPORT const char* tb_usage(int reset) {
  json result = json::array();
  for (const OpUsage& u : OpManager::instance().usage()) {
    result.push_back({{"op", u.op}, {"impl", u.impl_id}, {"calls", u.calls}});
  }
  if (reset != 0) OpManager::instance().reset_usage();
  return text(result.dump());
}

TB_EXPORT void* tb_layer_open(const char* spec) {
  auto layer = open_layer(nlohmann::json::parse(spec));
  if (layer.ok()) return layer->release();
  report(layer.status());
  return nullptr;
}
TB_EXPORT int tb_layer_step(void* layer, void* stream) {
  return report(step(*static_cast<Layer*>(layer), stream));
}
// Returns a device pointer to a tensor of the last step. which: 0 the output, 1 the gradient of x,
// 2 + i the gradient of parameter i, 1000 + i the value of parameter i.
TB_EXPORT const void* tb_layer_tensor(void* handle, int which) {
  auto& layer = *static_cast<Layer*>(handle);
  if (which == 0) return layer.y.raw_data();
  if (which == 1) return layer.dx.raw_data();
  const bool value = which >= 1000;
  const nn::NamedParameter& p =
      layer.parameters.at(static_cast<size_t>(which - (value ? 1000 : 2)));
  return value ? p.value().raw_data() : p.grad().raw_data();
}
TB_EXPORT const char* tb_layer_parameters(void* handle) {
  json result = json::array();
  for (const nn::NamedParameter& p : static_cast<Layer*>(handle)->parameters) {
    result.push_back({{"name", p.name}, {"shape", p.value().shape()}});
  }
  return text(result.dump());
}
// Returns the memory that te-fl holds on the GPU: {"bytes", "peak", "holders", "recorded": [{"use",
// "count", "bytes"}]}. Holders are the uses of the memory. Then resets the peak; when the total
// next reaches `record_at` bytes (0: never), te-fl records the holders.
TB_EXPORT const char* tb_memory(size_t record_at) {
  const auto account = devices::memory_account(kDevice);
  const Status watched = devices::watch_memory(kDevice, record_at == 0 ? SIZE_MAX : record_at);
  if (!account.ok() || !watched.ok()) {
    report(account.ok() ? watched : account.status());
    return nullptr;
  }
  const auto list = [](const std::vector<devices::MemoryHolder>& holders) {
    json result = json::array();
    for (const devices::MemoryHolder& h : holders) {
      result.push_back({{"use", h.use}, {"count", h.count}, {"bytes", h.bytes}});
    }
    return result;
  };
  return text(json{{"bytes", account->bytes},
                   {"peak", account->peak_bytes},
                   {"holders", list(account->holders)},
                   {"recorded", list(account->recorded)}}
                  .dump());
}
TB_EXPORT void tb_layer_close(void* layer) { delete static_cast<Layer*>(layer); }
