// NVIDIA's plugin: devices through the CUDA runtime, own kernels, cuBLASLt, cuDNN and NCCL.
#include <string>
#include <vector>

#include "attention/cudnn.hpp"
#include "comm/nccl_comm.hpp"
#include "device/architectures.hpp"
#include "device/cuda_check.hpp"
#include "device/device.hpp"
#include "device/side_streams.hpp"
#include "gemm/gemm_algorithm.hpp"
#include "plugin/diagnose.hpp"
#include "plugin/entry.hpp"
#include "plugin/families.hpp"
#include "te_fl/backend/plugin.hpp"
#include "te_fl/version.hpp"

namespace te_fl::cuda {
namespace {

using AppendOps = void (*)(std::vector<te_fl_op_desc>&);
constexpr AppendOps kFamilies[] = {
    append_activation,
    append_scaled_activation,
    append_quantize,  //
    append_quantize_lists,
    append_dequantize,
    append_scale_update,
    append_tensor,  //
    append_moe,
    append_chunks,
    append_permute_by_mask,
    append_router,     //
    append_dropout,    //
    append_optimizer,  //
    append_softmax,    //
    append_gemm,       //
    append_norm,       //
    append_attention,  //
    append_rope,       //
    append_collectives,
};

struct Cuda : backend::DeviceInstance {
  explicit Cuda(const te_fl_host_api& host);
  ~Cuda() {
    give_back_side_streams();
    for (Device& d : found) give_back_memory(d);
  }

  te_fl_status quiesce(const te_fl_error_sink* errors) const {
    for (const Device& d : found) {
      if (const te_fl_status status = synchronize_device(d.index, errors)) return status;
    }
    return TE_FL_OK;
  }
  void diagnose(const te_fl_finding_sink& findings) const {
    refuse_after_fork();
    report_surroundings(found, why_no_device, findings);
  }

  CudnnState cudnn;
  Entries entries;
  std::string why_no_device;
  std::vector<Device> found;
  std::vector<const te_fl_comm_desc*> comms;
};

Cuda::Cuda(const te_fl_host_api& host)
    : cudnn(&host), entries(backend::setting_is_on(host, "TE_FL_CUDA_NVTX")) {
  watch_forks();
  configure_gemm_choices(backend::setting(host, "TE_FL_CUDA_GEMM_FILE"),
                         backend::setting_is_on(host, "TE_FL_CUDA_GEMM_TUNE"), &host);
  configure_grouped_gemm(backend::setting_is_on(host, "TE_FL_CUDA_GROUPED_KERNEL"),
                         backend::setting(host, "TE_FL_CUDA_GROUPED_STREAMS"));
  configure_attention(backend::setting_mebibytes(host, "TE_FL_CUDA_ATTENTION_SCRATCH_MB", 2048));
  why_no_device = refuse_all(built_architectures(), gpu_architectures());
  if (!why_no_device.empty()) {  // neither devices nor ops, so that PyTorch's device may be used
    backend::log(host, TE_FL_LOG_WARNING, why_no_device);
    return;
  }
  enumerate(backend::setting_mebibytes(host, "TE_FL_DEVICE_CACHE_MB", 512), found, why_no_device);
  if (found.empty()) backend::log(host, TE_FL_LOG_DEBUG, "no CUDA device: " + why_no_device);
  for (const Device& d : found) devices.push_back(&d.desc);
  for (AppendOps append : kFamilies) append(ops);
  append_attention_cudnn(ops, cudnn);
  comms.push_back(&nccl_comm_desc());
  entries.wrap(ops);
}

// cuda.json.in describes the same settings; keep it in step with these descriptors.
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
constexpr te_fl_setting_desc kGroupedKernel = {
    .type = TE_FL_SETTING_BOOL,
    .name = "TE_FL_CUDA_GROUPED_KERNEL",
    .default_value = "1",
    .doc =
        "0: grouped_gemm runs on cuBLASLt also where the plugin has a kernel for the whole group.",
};
constexpr te_fl_setting_desc kGroupedStreamsSetting = {
    .type = TE_FL_SETTING_INT,
    .name = "TE_FL_CUDA_GROUPED_STREAMS",
    .default_value = "4",
    .choices = "1 8",
    .doc =
        "Streams over which the products of grouped_gemm go where one does not fill the GPU for "
        "many waves; 1: the caller's alone.",
};
constexpr te_fl_setting_desc kNvtx = {
    .type = TE_FL_SETTING_BOOL,
    .name = "TE_FL_CUDA_NVTX",
    .default_value = "0",
    .doc = "1: each op is marked with an NVTX range of the op's and the implementation's name.",
};
constexpr const te_fl_setting_desc* kSettings[] = {
    &kAttentionScratch, &kGemmFile, &kGemmTune, &kGroupedKernel, &kGroupedStreamsSetting, &kNvtx};

constexpr te_fl_plugin_header kHeader =
    backend::plugin_header<Cuda>("cuda", "nvidia", TE_FL_VERSION, kSettings);

}  // namespace
}  // namespace te_fl::cuda

extern "C" TE_FL_PLUGIN_EXPORT const te_fl_plugin_header* te_fl_plugin_query(
    const te_fl_host_info*) {
  return &te_fl::cuda::kHeader;
}
