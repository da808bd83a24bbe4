// The OpenCL plugin: the devices of OpenCL drivers, and portable kernels for them.
#include <string>
#include <vector>

#include "cl_check.hpp"
#include "clblast.hpp"
#include "device.hpp"
#include "families.hpp"
#include "signals.hpp"
#include "te_fl/backend/plugin.hpp"
#include "te_fl/version.hpp"

namespace te_fl::opencl {
namespace {

using AppendOps = void (*)(Ops&);
constexpr AppendOps kFamilies[] = {
    append_activation,  //
    append_tensor,      //
    append_dropout,     //
    append_gemm,        //
    append_optimizer,   //
    append_rope,        //
    append_norm,        //
    append_quantize,    //
    append_softmax,     //
};

// Enables CLBlast on GPUs, and on other devices only if the setting requests it.
void choose_products(Device& d, const char* wanted) {
  d.gemm.wanted = find_gemm_kernel(wanted);
  const bool useful =
      d.gemm.wanted == GemmKernel::kClblast || (d.gemm.wanted == GemmKernel::kAuto && d.gemm.gpu);
  d.gemm.clblast = useful && clblast_path() != nullptr && buffers_share_memory(d);
}

void diagnose_products(const te_fl_finding_sink& findings, const Device& d) {
  if (d.gemm.clblast) {
    backend::write_finding(findings, TE_FL_FINDING_OK, "CLBlast",
                           std::string(clblast_path()) +
                               (d.gemm.wanted == GemmKernel::kAuto ? ", for small F32 products of "
                                                                   : ", for F32 products of ") +
                               d.name);
  } else if (d.gemm.wanted == GemmKernel::kClblast ||
             (d.gemm.wanted == GemmKernel::kAuto && d.gemm.gpu)) {
    const bool there = clblast_path() != nullptr;
    backend::write_finding(findings, TE_FL_FINDING_NOTE, "CLBlast",
                           there ? std::string(clblast_path()) + ": buffers of " + d.name +
                                       " are copies of its shared virtual memory"
                                 : clblast_missing(),
                           "F32 products by it; the plugin's own kernels run them",
                           there ? "" : "install libclblast1");
  }
}

struct OpenCl : backend::DeviceInstance {
  explicit OpenCl(const te_fl_host_api& host);
  te_fl_status quiesce(const te_fl_error_sink* errors) const {
    for (const auto& d : found.devices) {
      if (const te_fl_status status = synchronize_device(*d, errors)) return status;
    }
    return TE_FL_OK;
  }
  void diagnose(const te_fl_finding_sink& findings) const;

  Enumeration found;
};

OpenCl::OpenCl(const te_fl_host_api& host) {
  watch_forks();
  {
    const SignalHandlersKept kept;  // the drivers start in this scope
    found = enumerate(backend::setting(host, "TE_FL_OPENCL_DEVICE"),
                      backend::setting_mebibytes(host, "TE_FL_DEVICE_CACHE_MB", 512));
  }
  const char* wanted = backend::setting(host, "TE_FL_OPENCL_GEMM");  // the host has checked it
  for (const auto& d : found.devices) choose_products(*d, wanted == nullptr ? "" : wanted);
  if (found.devices.empty()) {
    backend::log(host, TE_FL_LOG_DEBUG, "no OpenCL device: " + found.why_none);
  }
  for (const std::string& device : found.left_out) {
    backend::log(host, TE_FL_LOG_DEBUG, "not used, " + device);
  }
  for (const auto& d : found.devices) devices.push_back(&d->desc);
  for (AppendOps append : kFamilies) append(ops);
  for (te_fl_op_desc& op : ops) op.self = &found.devices;
}

void OpenCl::diagnose(const te_fl_finding_sink& findings) const {
  refuse_after_fork();
  for (const auto& d : found.devices) {
    backend::write_finding(findings, TE_FL_FINDING_OK, "driver",
                           d->platform + ", " + d->name + ", " + d->driver);
    diagnose_products(findings, *d);
    if (!d->exact) {
      backend::write_finding(findings, TE_FL_FINDING_NOTE, "FP32",
                             d->name + " does not divide with one rounding, or flushes subnormals",
                             "quantisation to FP8, which is exact; the host runs it");
    }
  }
  for (const std::string& device : found.left_out) {
    backend::write_finding(findings, TE_FL_FINDING_NOTE, "device", device, "that device",
                           "install a driver with OpenCL 2.0's shared virtual memory");
  }
  if (found.devices.empty()) {
    backend::write_finding(findings, TE_FL_FINDING_PROBLEM, "driver", found.why_none,
                           "OpenCL devices",
                           "install an OpenCL driver; pocl-opencl-icd runs on CPUs");
  }
}

// opencl.json.in describes the same settings; keep it in step with these descriptors.
constexpr te_fl_setting_desc kDevice = {
    .type = TE_FL_SETTING_LIST,
    .name = "TE_FL_OPENCL_DEVICE",
    .doc =
        "OpenCL devices that are provided, comma separated: numbers in the order of the drivers, "
        "or parts of device or platform names, any case; empty: all.",
};
constexpr te_fl_setting_desc kGemm = {
    .type = TE_FL_SETTING_ENUM,
    .name = "TE_FL_OPENCL_GEMM",
    .default_value = "auto",
    .choices = "auto rows tiles64 tiles128 clblast",
    .doc =
        "What products are made with: the plugin's own kernels for CPUs (rows) or for GPUs "
        "(tiles64, tiles128), or CLBlast where it can; auto: by device and sizes.",
};
constexpr const te_fl_setting_desc* kSettings[] = {&kDevice, &kGemm};

constexpr te_fl_plugin_header kHeader =
    backend::plugin_header<OpenCl>("opencl", "te-fl", TE_FL_VERSION, kSettings);

}  // namespace
}  // namespace te_fl::opencl

extern "C" TE_FL_PLUGIN_EXPORT const te_fl_plugin_header* te_fl_plugin_query(
    const te_fl_host_info*) {
  return &te_fl::opencl::kHeader;
}
