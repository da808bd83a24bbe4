#include "plugins/soname_hints.hpp"

#include <algorithm>
#include <array>

namespace te_fl::plugins {
namespace {

struct Hint {
  std::string_view soname;  // exact soname, or a stem that ends in ".so" and covers every version
  std::string_view apt;     // Debian/Ubuntu package
  std::string_view note;    // where that package comes from, or another installer
  std::string_view pypi;    // PyPI package, or empty
};

constexpr std::string_view kCuda = "NVIDIA's CUDA repository";
constexpr std::string_view kRocm = "AMD's ROCm repository";
constexpr std::string_view kDriver = "it comes with NVIDIA's driver, and only there";

// Exact sonames first: the first row that matches wins.
constexpr auto kHints = std::to_array<Hint>({
    // NVIDIA
    {"libcuda.so.1", "", kDriver, ""},
    {"libnvidia-ml.so.1", "", kDriver, ""},
    {"libcudart.so.12", "cuda-cudart-12-9", kCuda, "nvidia-cuda-runtime-cu12"},
    {"libcudart.so.13", "cuda-cudart-13-0", kCuda, "nvidia-cuda-runtime"},
    {"libcublas.so.12", "libcublas-12-9", kCuda, "nvidia-cublas-cu12"},
    {"libcublas.so.13", "libcublas-13-0", kCuda, "nvidia-cublas"},
    {"libcublasLt.so.12", "libcublas-12-9", kCuda, "nvidia-cublas-cu12"},
    {"libcublasLt.so.13", "libcublas-13-0", kCuda, "nvidia-cublas"},
    {"libnvrtc.so.12", "cuda-nvrtc-12-9", kCuda, "nvidia-cuda-nvrtc-cu12"},
    {"libnvrtc.so.13", "cuda-nvrtc-13-0", kCuda, "nvidia-cuda-nvrtc"},
    {"libnvJitLink.so.12", "libnvjitlink-12-9", kCuda, "nvidia-nvjitlink-cu12"},
    {"libnvJitLink.so.13", "libnvjitlink-13-0", kCuda, "nvidia-nvjitlink"},
    {"libcusparse.so.12", "libcusparse-12-9 or libcusparse-13-0", kCuda, "nvidia-cusparse-cu12"},
    {"libcurand.so.10", "libcurand-12-9 or libcurand-13-0", kCuda, "nvidia-curand-cu12"},
    {"libnvToolsExt.so.1", "cuda-nvtx-12-9", kCuda, "nvidia-nvtx-cu12"},
    {"libcudnn.so.9", "libcudnn9-cuda-12 or libcudnn9-cuda-13", kCuda,
     "nvidia-cudnn-cu12 or nvidia-cudnn-cu13"},
    {"libnccl.so.2", "libnccl2", kCuda, "nvidia-nccl-cu12 or nvidia-nccl-cu13"},
    {"libnvshmem_host.so.3", "libnvshmem3-cuda-12 or libnvshmem3-cuda-13", kCuda,
     "nvidia-nvshmem-cu12 or nvidia-nvshmem-cu13"},
    {"libcudart.so", "cuda-cudart-MAJOR-MINOR of the same major version", kCuda, ""},
    {"libcublas.so", "libcublas-MAJOR-MINOR of the same major version", kCuda, ""},
    {"libcublasLt.so", "libcublas-MAJOR-MINOR of the same major version", kCuda, ""},
    {"libcudnn.so", "libcudnnMAJOR of the same major version", kCuda, ""},
    // OpenCL, Level Zero, SYCL
    {"libOpenCL.so.1", "ocl-icd-libopencl1", "", ""},
    {"libze_loader.so.1", "libze1", "level-zero in Intel's graphics repository", ""},
    {"libsycl.so", "intel-oneapi-runtime-dpcpp-cpp", "Intel's oneAPI repository", "intel-sycl-rt"},
    // AMD
    {"libamdhip64.so.5", "libamdhip64-5", "", ""},
    {"libamdhip64.so", "hip-runtime-amd", kRocm, ""},
    {"libhsa-runtime64.so.1", "libhsa-runtime64-1", "or hsa-rocr from AMD's ROCm repository", ""},
    {"libhipblas.so", "hipblas", kRocm, ""},
    {"libhipblaslt.so", "hipblaslt", kRocm, ""},
    {"librocblas.so", "rocblas", kRocm, ""},
    {"libMIOpen.so", "miopen-hip", kRocm, ""},
    {"librccl.so", "rccl", kRocm, ""},
    // Other makers, whose toolkits have installers of their own
    {"libascendcl.so", "",
     "it is part of Huawei's CANN toolkit: install it and source its set_env.sh", ""},
    {"libhccl.so", "", "it is part of Huawei's CANN toolkit: install it and source its set_env.sh",
     ""},
    {"libcnrt.so", "", "it is part of Cambricon's CNToolkit", ""},
    {"libcnnl.so", "", "it is part of Cambricon's CNNL package", ""},
    {"libmusart.so", "", "it is part of Moore Threads' MUSA toolkit", ""},
    {"libmcruntime.so", "", "it is part of MetaX's MACA toolkit", ""},
    {"libtorch.so", "", "", "torch"},
    {"libtorch_cpu.so", "", "", "torch"},
    {"libtorch_cuda.so", "", "", "torch"},
    {"libc10.so", "", "", "torch"},
    // Mathematics and threads
    {"libopenblas.so.0", "libopenblas0-pthread", "", ""},
    {"libdnnl.so.2", "libdnnl2", "Debian 12", "onednn==2.*"},
    {"libdnnl.so.3", "libdnnl3", "Ubuntu 24.04 and later", "onednn"},
    {"libmkl_rt.so", "intel-oneapi-mkl", "Intel's oneAPI repository", "mkl"},
    {"libblas.so.3", "libblas3", "", ""},
    {"liblapack.so.3", "liblapack3", "", ""},
    {"libgomp.so.1", "libgomp1", "", ""},
    {"libomp.so.5", "libomp5", "", ""},
    {"libtbb.so.12", "libtbb12", "", ""},
    {"libhwy.so.1", "libhwy1 (Ubuntu 24.04: libhwy1t64)", "", ""},
    {"libnuma.so.1", "libnuma1", "", ""},
    // The compiler's and the C library's own
    {"libstdc++.so.6", "libstdc++6", "", ""},
    {"libgcc_s.so.1", "libgcc-s1", "", ""},
    {"libgfortran.so.5", "libgfortran5", "", ""},
    {"libatomic.so.1", "libatomic1", "", ""},
    {"libc++.so.1", "libc++1", "", ""},
    {"libasan.so.8", "libasan8", "", ""},
    {"libtsan.so.2", "libtsan2", "", ""},
    {"libubsan.so.1", "libubsan1", "", ""},
    {"libc.so.6", "libc6", "", ""},
    {"libm.so.6", "libc6", "", ""},
    {"libc.musl-x86_64.so.1", "", "the library was built for musl (Alpine): rebuild it here", ""},
    // Helpers
    {"libspdlog.so.1.10", "libspdlog1.10", "Debian 12", ""},
    {"libspdlog.so.1.12", "libspdlog1.12", "Ubuntu 24.04", ""},
    {"libspdlog.so", "", "each release has a soname of its own: rebuild the plugin here", ""},
    {"libfmt.so.9", "libfmt9", "", ""},
    {"libyaml-cpp.so.0.7", "libyaml-cpp0.7", "Debian 12", ""},
    {"libyaml-cpp.so.0.8", "libyaml-cpp0.8", "Ubuntu 24.04", ""},
    {"libssl.so.3", "libssl3 (Ubuntu 24.04: libssl3t64)", "", ""},
    {"libcrypto.so.3", "libssl3 (Ubuntu 24.04: libssl3t64)", "", ""},
    {"libz.so.1", "zlib1g", "", ""},
});

bool matches(std::string_view row, std::string_view soname) {
  if (row == soname) return true;
  return row.ends_with(".so") && soname.starts_with(row) && soname[row.size()] == '.';
}

}  // namespace

std::string soname_hint(std::string_view soname) {
  const auto* row = std::find_if(kHints.begin(), kHints.end(),
                                 [&](const Hint& h) { return matches(h.soname, soname); });
  const std::string folder_note =
      "if it is installed in a folder of its own, add that folder to LD_LIBRARY_PATH before the "
      "program starts";
  if (row == kHints.end()) {
    return "find its package with: apt-file search " + std::string(soname) + "; " + folder_note;
  }
  if (row->apt.empty() && row->pypi.empty()) return std::string(row->note);
  std::string out;
  if (!row->apt.empty()) {
    out = "install the apt package " + std::string(row->apt);
    if (!row->note.empty()) out += " (" + std::string(row->note) + ")";
  }
  if (!row->pypi.empty()) {
    if (!out.empty()) out += ", or ";
    out += std::string(out.empty() ? "install the " : "the ") + "PyPI package " +
           std::string(row->pypi) +
           ", whose lib folder must be in LD_LIBRARY_PATH before the program starts";
  }
  return out;
}

std::string version_hint(std::string_view version, std::string_view library) {
  if (version.starts_with("GLIBC_")) {
    return "it was built on a newer system: rebuild it on this one or an older one, or move to a "
           "system whose C library has that version";
  }
  if (version.starts_with("GLIBCXX_") || version.starts_with("CXXABI_")) {
    return "it was built with a newer compiler: update libstdc++6, rebuild it here, or link it "
           "with "
           "-static-libstdc++; a conda environment may also bring an older libstdc++ first";
  }
  return "install a newer " + std::string(library) + ", or rebuild it here";
}

std::string symbol_hint(std::string_view symbol) {
  if (symbol.starts_with("__asan_")) {
    return "it was built with AddressSanitizer: start the program with LD_PRELOAD=libasan.so.8";
  }
  if (symbol.starts_with("__tsan_")) {
    return "it was built with ThreadSanitizer: start the program with LD_PRELOAD=libtsan.so.2";
  }
  if (symbol.starts_with("__ubsan_")) {
    return "it was built with UndefinedBehaviorSanitizer: link it with -fsanitize=undefined";
  }
  if (symbol.starts_with("te_fl_")) {
    return "a plugin receives the host's functions through its tables and must not link to them";
  }
  return {};
}

}  // namespace te_fl::plugins
