// The OpenCL plugin: the devices of OpenCL drivers and portable kernels for them.
#include <cstdlib>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "cl_check.hpp"
#include "clblast.hpp"
#include "device.hpp"
#include "families.hpp"
#include "signals.hpp"
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

struct Instance {
  Enumeration found;
  std::vector<const te_fl_device_desc*> device_list;
  Ops ops;
  std::vector<const te_fl_op_desc*> op_list;
};

// The library serves GPUs; on others only where it is asked for.
void choose_products(Device& d, const char* wanted) {
  d.gemm.wanted = gemm_kernel_of(wanted);
  const bool useful =
      d.gemm.wanted == GemmKernel::kClblast || (d.gemm.wanted == GemmKernel::kAuto && d.gemm.gpu);
  d.gemm.clblast = useful && clblast_path() != nullptr && buffers_share_memory(d);
}

te_fl_status create(const te_fl_host_api* host, void** out, const te_fl_error_sink* errors) {
  return backend::guard(errors, [&] {
    watch_forks();
    const auto setting = [&](const char* name) {
      return host->setting != nullptr ? host->setting(host->host, name) : nullptr;
    };
    const auto say = [&](const std::string& text) {
      if (host->log != nullptr) host->log(host->host, TE_FL_LOG_DEBUG, text.c_str());
    };
    const char* cache = setting("TE_FL_DEVICE_CACHE_MB");  // which the host has checked
    const size_t cache_mb = cache != nullptr ? std::strtoull(cache, nullptr, 10) : 512;
    auto instance = std::make_unique<Instance>();
    Enumeration& found = instance->found;
    {
      const SignalHandlersKept kept;  // drivers start here
      found = enumerate(setting("TE_FL_OPENCL_DEVICE"), cache_mb << 20);
    }
    const char* wanted = setting("TE_FL_OPENCL_GEMM");  // which the host has checked
    for (const auto& d : found.devices) choose_products(*d, wanted == nullptr ? "" : wanted);
    if (found.devices.empty()) say("no OpenCL device: " + found.why_none);
    for (const std::string& device : found.left_out) say("not used, " + device);
    for (const auto& d : found.devices) instance->device_list.push_back(&d->desc);
    for (AppendOps append : kFamilies) append(instance->ops);
    for (te_fl_op_desc& op : instance->ops) {
      op.self = &found.devices;
      instance->op_list.push_back(&op);
    }
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
  for (const auto& d : static_cast<const Instance*>(self)->found.devices) {
    if (const te_fl_status status = synchronize_device(*d, errors)) return status;
  }
  return TE_FL_OK;
}

void write(const te_fl_finding_sink& findings, te_fl_finding_level level, const char* subject,
           const std::string& state, const char* disables, const char* remedy) {
  te_fl_finding finding;
  finding.level = level;
  finding.subject = subject;
  finding.state = state.c_str();
  finding.disables = disables;
  finding.remedy = remedy;
  findings.write(findings.host, &finding);
}

void diagnose_products(const te_fl_finding_sink& findings, const Device& d) {
  if (d.gemm.clblast) {
    write(findings, TE_FL_FINDING_OK, "CLBlast",
          std::string(clblast_path()) +
              (d.gemm.wanted == GemmKernel::kAuto ? ", for small F32 products of "
                                                  : ", for F32 products of ") +
              d.name,
          nullptr, nullptr);
  } else if (d.gemm.wanted == GemmKernel::kClblast ||
             (d.gemm.wanted == GemmKernel::kAuto && d.gemm.gpu)) {
    const bool there = clblast_path() != nullptr;
    write(findings, TE_FL_FINDING_NOTE, "CLBlast",
          there ? std::string(clblast_path()) + ": buffers of " + d.name +
                      " are copies of its shared virtual memory"
                : clblast_missing(),
          "F32 products by it; the plugin's own kernels serve them",
          there ? nullptr : "install libclblast1");
  }
}

te_fl_status diagnose(void* self, const te_fl_finding_sink* findings,
                      const te_fl_error_sink* errors) {
  const Enumeration& found = static_cast<const Instance*>(self)->found;
  return backend::guard(errors, [&] {
    refuse_after_fork();
    for (const auto& d : found.devices) {
      write(*findings, TE_FL_FINDING_OK, "driver", d->platform + ", " + d->name + ", " + d->driver,
            nullptr, nullptr);
      diagnose_products(*findings, *d);
      if (!d->exact) {
        write(*findings, TE_FL_FINDING_NOTE, "FP32",
              d->name + " does not divide with one rounding, or flushes subnormals",
              "quantisation to FP8, which is exact; the host serves it", nullptr);
      }
    }
    for (const std::string& device : found.left_out) {
      write(*findings, TE_FL_FINDING_NOTE, "device", device, "that device",
            "install a driver with OpenCL 2.0's shared virtual memory");
    }
    if (found.devices.empty()) {
      write(*findings, TE_FL_FINDING_PROBLEM, "driver", found.why_none, "OpenCL devices",
            "install an OpenCL driver; pocl-opencl-icd runs on CPUs");
    }
  });
}

void destroy(void* self) { delete static_cast<Instance*>(self); }

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

// opencl.json.in says the same of them.
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

constexpr te_fl_plugin_header kHeader = {
    .magic = TE_FL_PLUGIN_MAGIC,
    .struct_size = sizeof(te_fl_plugin_header),
    .abi_major = TE_FL_ABI_MAJOR,
    .abi_minor = TE_FL_ABI_MINOR,
    .min_host_minor = 0,
    .features = 0,
    .name = "opencl",
    .vendor = "te-fl",
    .version = TE_FL_VERSION,
    .build_id = nullptr,
    .api = &kApi,
    .reserved = {},
    .settings = kSettings,
    .setting_count = std::size(kSettings),
};

}  // namespace
}  // namespace te_fl::opencl

extern "C" TE_FL_PLUGIN_EXPORT const te_fl_plugin_header* te_fl_plugin_query(
    const te_fl_host_info*) {
  return &te_fl::opencl::kHeader;
}
