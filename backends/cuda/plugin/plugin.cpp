// NVIDIA's plugin: devices through the CUDA runtime, own kernels, cuBLASLt, cuDNN.
#include <cstdlib>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "attention/cudnn.hpp"
#include "device/cuda_check.hpp"
#include "device/device.hpp"
#include "gemm/gemm_algorithm.hpp"
#include "plugin/diagnose.hpp"
#include "plugin/entry.hpp"
#include "plugin/families.hpp"
#include "te_fl/version.hpp"

namespace te_fl::cuda {
namespace {

using AppendOps = void (*)(std::vector<te_fl_op_desc>&);
constexpr AppendOps kFamilies[] = {
    append_activation,  //
    append_quantize,    //
    append_quantize_lists, append_dequantize, append_scale_update,
    append_tensor,     //
    append_dropout,    //
    append_optimizer,  //
    append_softmax,    //
    append_gemm,       //
    append_norm,       //
    append_attention,  //
    append_rope,       //
};

struct Instance {
  Instance(const te_fl_host_api* host, bool ranges) : cudnn(host), entries(ranges) {}

  CudnnState cudnn;
  Entries entries;
  std::string why_no_device;
  std::vector<Device> devices;
  std::vector<const te_fl_device_desc*> device_list;
  std::vector<te_fl_op_desc> ops;
  std::vector<const te_fl_op_desc*> op_list;
};

// A setting in MiB, which the host has checked, in bytes.
size_t mebibytes(const char* text, size_t otherwise) {
  return (text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise) << 20;
}

te_fl_status create(const te_fl_host_api* host, void** out, const te_fl_error_sink* errors) {
  return backend::guard(errors, [&] {
    watch_forks();
    const auto setting = [&](const char* name) {
      return host->setting != nullptr ? host->setting(host->host, name) : nullptr;
    };
    const char* tune = setting("TE_FL_CUDA_GEMM_TUNE");
    configure_gemm_choices(setting("TE_FL_CUDA_GEMM_FILE"),
                           tune != nullptr && std::string(tune) == "1", host);
    configure_attention(mebibytes(setting("TE_FL_CUDA_ATTENTION_SCRATCH_MB"), 2048));
    const char* ranges = setting("TE_FL_CUDA_NVTX");
    auto instance =
        std::make_unique<Instance>(host, ranges != nullptr && std::string(ranges) == "1");
    enumerate(mebibytes(setting("TE_FL_DEVICE_CACHE_MB"), 512), instance->devices,
              instance->why_no_device);
    if (instance->devices.empty() && host->log != nullptr) {
      host->log(host->host, TE_FL_LOG_DEBUG,
                ("no CUDA device: " + instance->why_no_device).c_str());
    }
    for (const Device& d : instance->devices) instance->device_list.push_back(&d.desc);
    for (AppendOps append : kFamilies) append(instance->ops);
    append_attention_cudnn(instance->ops, instance->cudnn);
    instance->entries.wrap(instance->ops);
    for (const te_fl_op_desc& op : instance->ops) instance->op_list.push_back(&op);
    *out = instance.release();
  });
}

te_fl_status devices(void* self, uint32_t* count, const te_fl_device_desc* const** list,
                     const te_fl_error_sink*) {
  const auto* instance = static_cast<const Instance*>(self);
  *count = static_cast<uint32_t>(instance->device_list.size());
  *list = instance->device_list.data();
  return TE_FL_OK;
}

te_fl_status ops(void* self, uint32_t* count, const te_fl_op_desc* const** list,
                 const te_fl_error_sink*) {
  const auto* instance = static_cast<const Instance*>(self);
  *count = static_cast<uint32_t>(instance->op_list.size());
  *list = instance->op_list.data();
  return TE_FL_OK;
}

te_fl_status quiesce(void* self, const te_fl_error_sink* errors) {
  for (const Device& d : static_cast<const Instance*>(self)->devices) {
    if (const te_fl_status status = synchronize_device(d.index, errors)) return status;
  }
  return TE_FL_OK;
}

te_fl_status diagnose(void* self, const te_fl_finding_sink* findings,
                      const te_fl_error_sink* errors) {
  const auto* instance = static_cast<const Instance*>(self);
  return backend::guard(errors, [&] {
    refuse_after_fork();
    report_surroundings(instance->devices, instance->why_no_device, *findings);
  });
}

void destroy(void* self) {
  auto* instance = static_cast<Instance*>(self);
  for (Device& d : instance->devices) give_back_memory(d);
  delete instance;
}

constexpr te_fl_plugin_api kApi = {
    .struct_size = sizeof(te_fl_plugin_api),
    .reserved = 0,
    .create = create,
    .devices = devices,
    .ops = ops,
    .quiesce = quiesce,
    .destroy = destroy,
    .diagnose = diagnose,
};

// cuda.json.in says the same of them.
constexpr te_fl_setting_desc kAttentionScratch = {
    .type = TE_FL_SETTING_INT,
    .name = "TE_FL_CUDA_ATTENTION_SCRATCH_MB",
    .default_value = "2048",
    .choices = "0 1048576",
    .doc =
        "MiB of scratch that a backward of attention may take to keep what it computes twice "
        "otherwise: dropout's decisions, and with dbias the gradients of the scores.",
};
constexpr te_fl_setting_desc kGemmFile = {
    .type = TE_FL_SETTING_FILE,
    .name = "TE_FL_CUDA_GEMM_FILE",
    .doc = "File of measured cuBLASLt algorithms that products take.",
};
constexpr te_fl_setting_desc kGemmTune = {
    .type = TE_FL_SETTING_BOOL,
    .name = "TE_FL_CUDA_GEMM_TUNE",
    .default_value = "0",
    .doc =
        "1: products that TE_FL_CUDA_GEMM_FILE lacks are measured when first met, all candidates "
        "of the library and what varies them, some 4 s each, and added to it.",
};
constexpr te_fl_setting_desc kNvtx = {
    .type = TE_FL_SETTING_BOOL,
    .name = "TE_FL_CUDA_NVTX",
    .default_value = "0",
    .doc = "1: each op is marked with an NVTX range of the op's and the implementation's name.",
};
constexpr const te_fl_setting_desc* kSettings[] = {&kAttentionScratch, &kGemmFile, &kGemmTune,
                                                   &kNvtx};

constexpr te_fl_plugin_header kHeader = {
    .magic = TE_FL_PLUGIN_MAGIC,
    .struct_size = sizeof(te_fl_plugin_header),
    .abi_major = TE_FL_ABI_MAJOR,
    .abi_minor = TE_FL_ABI_MINOR,
    .min_host_minor = 0,
    .features = 0,
    .name = "cuda",
    .vendor = "nvidia",
    .version = TE_FL_VERSION,
    .build_id = nullptr,
    .api = &kApi,
    .reserved = {},
    .settings = kSettings,
    .setting_count = std::size(kSettings),
};

}  // namespace
}  // namespace te_fl::cuda

extern "C" TE_FL_PLUGIN_EXPORT const te_fl_plugin_header* te_fl_plugin_query(
    const te_fl_host_info*) {
  return &te_fl::cuda::kHeader;
}
