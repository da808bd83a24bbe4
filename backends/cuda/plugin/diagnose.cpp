#include "plugin/diagnose.hpp"

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "attention/cudnn.hpp"
#include "device/architectures.hpp"
#include "device/bandwidth.hpp"
#include "device/cuda_check.hpp"
#include "gemm/cublaslt.hpp"
#include "gemm/gemm_algorithm.hpp"
#include "gemm/gemm_limits.hpp"
#include "plugin/nccl.hpp"
#include "te_fl/backend/plugin.hpp"

namespace te_fl::cuda {
namespace {

// Formats CUDA's version number: 13000 is 13.0.
std::string cuda_version(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

void report_driver(const te_fl_finding_sink& findings, bool devices, const std::string& why) {
  int driver = 0, runtime = 0;
  const bool known = cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0;
  (void)cudaRuntimeGetVersion(&runtime);
  (void)cudaGetLastError();
  const std::string versions = (known ? "for CUDA " + cuda_version(driver) : std::string("none")) +
                               "; the plugin's runtime is " + cuda_version(runtime);
  if (devices) return backend::write_finding(findings, TE_FL_FINDING_OK, "NVIDIA driver", versions);
  backend::write_finding(
      findings, TE_FL_FINDING_NOTE, "no CUDA device", why + " (driver: " + versions + ")",
      "everything on NVIDIA GPUs; the host backends run all calls",
      "nothing on a machine without an NVIDIA GPU; else install NVIDIA's driver (Debian: "
      "nvidia-driver; Ubuntu: ubuntu-drivers install), and in a container pass the GPU "
      "through (--gpus all)");
}

void report_device(const te_fl_finding_sink& findings, int index) {
  cudaDeviceProp p{};
  check(cudaGetDeviceProperties(&p, index), "cudaGetDeviceProperties");
  char text[512];
  std::snprintf(text, sizeof text, "%s, compute capability %d.%d, %d SMs, %.1f GiB, L2 %.0f MiB",
                p.name, p.major, p.minor, p.multiProcessorCount,
                static_cast<double>(p.totalGlobalMem) / (1 << 30),
                static_cast<double>(p.l2CacheSize) / (1 << 20));
  if (const double rate = measure_copy_bandwidth(index); rate > 0) {
    const size_t used = std::strlen(text);
    std::snprintf(text + used, sizeof text - used, ", copies %.0f GB/s (read plus written)",
                  rate / 1e9);
  }
  const std::string subject = "cuda:" + std::to_string(index);
  const bool served = built_for(TE_FL_CUDA_ARCHITECTURES, 10 * p.major + p.minor);
  if (served) return backend::write_finding(findings, TE_FL_FINDING_OK, subject, text);
  const std::string_view wanted = architecture_for(10 * p.major + p.minor);
  backend::write_finding(
      findings, TE_FL_FINDING_PROBLEM, subject,
      std::string(text) + ": this build has kernels for " TE_FL_CUDA_ARCHITECTURES " only",
      "every op of vendor.cuda on it",
      wanted.empty() ? "use another device; kernels can be built for " +
                           std::string(kKnownArchitectures) + " only"
                     : "configure te-fl with -DTE_FL_CUDA_ARCHITECTURES=" + std::string(wanted));
}

// Splits a text such as "what is wrong: install ..." at `between` into the finding and its remedy.
void report_missing(const te_fl_finding_sink& findings, te_fl_finding_level level,
                    const char* subject, const std::string& text, const char* disables,
                    const char* between = ": install ") {
  const size_t at = text.find(between);
  const bool split = at != std::string::npos;
  backend::write_finding(findings, level, subject, split ? text.substr(0, at) : text, disables,
                         split ? text.substr(at + 2) : "");
}

std::string library_version(size_t number, const std::string& path) {
  return std::to_string(number / 10000) + "." + std::to_string(number / 100 % 100) + "." +
         std::to_string(number % 100) + ", " + path;
}

void report_libraries(const te_fl_finding_sink& findings, bool devices) {
  const CublasLt* lt = cublaslt();
  if (lt == nullptr) {
    report_missing(findings, devices ? TE_FL_FINDING_PROBLEM : TE_FL_FINDING_NOTE, "cuBLASLt",
                   cublaslt_missing(), "products on NVIDIA GPUs (generic_gemm), so every layer");
  } else if (lt->number < kBlockLibraryVersion) {
    backend::write_finding(findings, TE_FL_FINDING_NOTE, "cuBLASLt",
                           library_version(lt->number, lt->path), "FP8 products with block scaling",
                           "install libcublas of CUDA 12.9 or newer");
  } else {
    backend::write_finding(findings, TE_FL_FINDING_OK, "cuBLASLt",
                           library_version(lt->number, lt->path));
  }
  if (const std::string wrong = gemm_choices_error(); !wrong.empty()) {
    report_missing(findings, TE_FL_FINDING_PROBLEM, "choices of products", wrong,
                   "products on NVIDIA GPUs (generic_gemm), so every layer", "; ");
  }
  if (const Cudnn* dnn = cudnn(); dnn != nullptr) {
    backend::write_finding(findings, TE_FL_FINDING_OK, "cuDNN",
                           library_version(dnn->number, dnn->path));
  } else {
    report_missing(findings, TE_FL_FINDING_NOTE, "cuDNN", cudnn_missing(),
                   "only the fast path of attention; the plugin's own kernels run it, slower");
  }
  if (const Nccl* n = nccl(); n != nullptr) {
    backend::write_finding(findings, TE_FL_FINDING_OK, "NCCL",
                           library_version(static_cast<size_t>(n->number), n->path));
  } else {
    report_missing(
        findings, TE_FL_FINDING_NOTE, "NCCL", nccl_missing(),
        "only collectives on NVIDIA GPUs (all_reduce and the others), so training on several");
  }
}

}  // namespace

std::string_view built_architectures() noexcept { return TE_FL_CUDA_ARCHITECTURES; }

void report_surroundings(const std::vector<Device>& devices, const std::string& why_no_device,
                         const te_fl_finding_sink& findings) {
  report_driver(findings, !devices.empty(), why_no_device);
  for (const Device& d : devices) report_device(findings, d.index);
  report_libraries(findings, !devices.empty());
}

}  // namespace te_fl::cuda
