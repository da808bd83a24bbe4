#include "clblast.hpp"

#include <dlfcn.h>

#include <atomic>
#include <string>

namespace te_fl::opencl {
namespace {

// The part of CLBlast's C interface that is used, declared here so that building needs no CLBlast
// headers.
using Sgemm = int (*)(int layout, int trans_a, int trans_b, size_t m, size_t n, size_t k,
                      float alpha, cl_mem a, size_t a_offset, size_t a_ld, cl_mem b,
                      size_t b_offset, size_t b_ld, float beta, cl_mem d, size_t d_offset,
                      size_t d_ld, cl_command_queue* queue, cl_event* event);
using ClearCache = int (*)();
constexpr int kRowMajor = 101, kPlain = 111, kTransposed = 112;

struct Library {
  Sgemm sgemm = nullptr;
  ClearCache clear_cache = nullptr;
  std::string path, missing;

  Library() {
    void* handle = dlopen("libclblast.so.1", RTLD_NOLOAD | RTLD_NOW);
    if (handle == nullptr) handle = dlopen("libclblast.so.1", RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      missing = std::string("CLBlast was not found (") + dlerror() + ")";
      return;
    }
    sgemm = reinterpret_cast<Sgemm>(dlsym(handle, "CLBlastSgemm"));
    clear_cache = reinterpret_cast<ClearCache>(dlsym(handle, "CLBlastClearCache"));
    if (sgemm == nullptr || clear_cache == nullptr) {
      missing = "CLBlast has no CLBlastSgemm or no CLBlastClearCache";
      return;
    }
    Dl_info info{};
    if (dladdr(reinterpret_cast<void*>(sgemm), &info) != 0 && info.dli_fname != nullptr) {
      path = info.dli_fname;
    }
  }
};

std::atomic<bool> g_used{false};

const Library& library() {
  static const Library instance;
  return instance;
}

// A cl_mem over the memory of an operand. It starts at the preceding 256-byte boundary, which lies
// in the same allocation.
class Buffer {
 public:
  Buffer(cl_context context, const void* data, int64_t elements) {
    const auto address = reinterpret_cast<uintptr_t>(data);
    const uintptr_t begin = address / 256 * 256;
    offset_ = (address - begin) / sizeof(float);
    cl_int error = CL_SUCCESS;
    buffer_ = clCreateBuffer(context, CL_MEM_READ_WRITE | CL_MEM_USE_HOST_PTR,
                             (offset_ + static_cast<size_t>(elements)) * sizeof(float),
                             reinterpret_cast<void*>(begin), &error);
    check(error, "clCreateBuffer");
  }
  // Enqueued work holds its own reference to the buffer until it has run.
  ~Buffer() { clReleaseMemObject(buffer_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  cl_mem get() const { return buffer_; }
  size_t offset() const { return offset_; }

 private:
  cl_mem buffer_ = nullptr;
  size_t offset_ = 0;
};

}  // namespace

const char* clblast_path() noexcept {
  return library().missing.empty() ? library().path.c_str() : nullptr;
}
const char* clblast_missing() noexcept { return library().missing.c_str(); }

bool buffers_share_memory(const Device& device) noexcept {
  cl_device_type type = 0;
  clGetDeviceInfo(device.id, CL_DEVICE_TYPE, sizeof type, &type, nullptr);
  if ((type & CL_DEVICE_TYPE_CPU) != 0) return true;  // host memory is the device's memory
  cl_int error = CL_SUCCESS;
  cl_mem buffer = clCreateBuffer(device.context, CL_MEM_READ_WRITE | CL_MEM_USE_HOST_PTR, 256,
                                 device.nothing, &error);
  if (error != CL_SUCCESS) return false;
  cl_bool shared = CL_FALSE;
  clGetMemObjectInfo(buffer, CL_MEM_USES_SVM_POINTER, sizeof shared, &shared, nullptr);
  clReleaseMemObject(buffer);
  return shared == CL_TRUE;
}

void clblast_sgemm(const DeviceCall& call, const Product& p) {
  g_used = true;
  const cl_context context = call.device.context;
  const Buffer a(context, p.a, p.m * p.k), b(context, p.b, p.k * p.n), d(context, p.d, p.m * p.n);
  const auto size = [](int64_t n) { return static_cast<size_t>(n); };
  cl_command_queue queue = call.device.queue_of(call.stream());
  const int status =
      library().sgemm(kRowMajor, p.trans_a ? kTransposed : kPlain, p.trans_b ? kTransposed : kPlain,
                      size(p.m), size(p.n), size(p.k), p.alpha, a.get(), a.offset(),
                      size(p.trans_a ? p.m : p.k), b.get(), b.offset(), size(p.trans_b ? p.k : p.n),
                      p.beta, d.get(), d.offset(), size(p.n), &queue, nullptr);
  if (status == CL_SUCCESS) return;
  const std::string shape =
      std::to_string(p.m) + "x" + std::to_string(p.n) + "x" + std::to_string(p.k);
  throw_error(status, "CLBlastSgemm",
              " for " + shape + "; TE_FL_OPENCL_GEMM=tiles64 does without it");
}

void clblast_forget() noexcept {
  if (g_used.exchange(false)) library().clear_cache();
}

}  // namespace te_fl::opencl
