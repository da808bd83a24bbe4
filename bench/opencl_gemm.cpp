// Times generic_gemm of the OpenCL plugin (default.opencl) against CLBlast's Gemm on one device and
// command queue, alternately. Prints a table; --json also writes a file.
//
//   opencl_gemm [--device opencl:0] [--match TEXT] [--seconds S] [--json FILE]
//
// TE_FL_PLUGIN_MODULES names the plugin. CLBlast is opened at run time (libclblast.so.1, or what
// CLBLAST_LIBRARY names) and gets plain buffers, its preferred memory. A ratio is the median
// of the ratios of neighbouring samples, CLBlast's time over te-fl's: above 1 te-fl is faster.
#include <CL/cl.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "te_fl/numeric/formats.hpp"
#include "te_fl/te_fl.hpp"

namespace {

using te_fl::Device;
using te_fl::DType;
using te_fl::Tensor;
using Clock = std::chrono::steady_clock;

void must(const te_fl::Status& status) {
  if (!status.ok()) te_fl::die(status);
}
template <class T>
T must(te_fl::Result<T> result) {
  must(result.status());
  return std::move(result).value();
}
void must(cl_int error, const char* call) {
  if (error == CL_SUCCESS) return;
  std::fprintf(stderr, "%s: error %d\n", call, error);
  std::exit(1);
}

struct Shape {
  const char* name;
  int64_t m, n, k;
  bool trans_a, trans_b;
};
// A GEMM with trans_b is a Linear layer's forward; one with trans_a is its weight gradient.
constexpr Shape kShapes[] = {
    {"square", 512, 512, 512, false, true},    {"square", 1024, 1024, 1024, false, true},
    {"square", 2048, 2048, 2048, false, true}, {"dgrad", 1024, 1024, 1024, false, false},
    {"wgrad", 1024, 1024, 1024, true, false},  {"tall", 8192, 256, 512, false, true},
    {"wide", 256, 4096, 1024, false, true},    {"deep", 256, 256, 8192, true, false},
    {"odd", 1023, 1025, 1021, false, true},    {"odd", 777, 333, 555, true, false},
    {"thin", 7, 4096, 1024, false, true},
};

// The part of CLBlast's C interface that is used here; building needs none of CLBlast's files.
template <class Scalar>
using Gemm = int (*)(int layout, int trans_a, int trans_b, size_t m, size_t n, size_t k,
                     Scalar alpha, cl_mem a, size_t a_offset, size_t a_ld, cl_mem b,
                     size_t b_offset, size_t b_ld, Scalar beta, cl_mem c, size_t c_offset,
                     size_t c_ld, cl_command_queue* queue, cl_event* event);
constexpr int kRowMajor = 101, kPlain = 111, kTransposed = 112;

struct ClBlast {
  Gemm<float> single = nullptr;
  Gemm<cl_half> half = nullptr;
  std::string path, missing;

  ClBlast() {
    const char* named = std::getenv("CLBLAST_LIBRARY");
    void* handle = dlopen(named != nullptr ? named : "libclblast.so.1", RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      missing = dlerror();
      return;
    }
    single = reinterpret_cast<Gemm<float>>(dlsym(handle, "CLBlastSgemm"));
    half = reinterpret_cast<Gemm<cl_half>>(dlsym(handle, "CLBlastHgemm"));
    if (single == nullptr || half == nullptr) missing = "it has no CLBlastSgemm or CLBlastHgemm";
    Dl_info info{};
    if (single != nullptr && dladdr(reinterpret_cast<void*>(single), &info) != 0) {
      path = info.dli_fname;
    }
  }
};

struct Queue {
  cl_command_queue queue;
  cl_context context = nullptr;
  cl_device_id device = nullptr;
  explicit Queue(void* stream) : queue(static_cast<cl_command_queue>(stream)) {
    must(clGetCommandQueueInfo(queue, CL_QUEUE_CONTEXT, sizeof context, &context, nullptr),
         "clGetCommandQueueInfo");
    must(clGetCommandQueueInfo(queue, CL_QUEUE_DEVICE, sizeof device, &device, nullptr),
         "clGetCommandQueueInfo");
  }
  std::string text(cl_device_info what) const {
    size_t bytes = 0;
    must(clGetDeviceInfo(device, what, 0, nullptr, &bytes), "clGetDeviceInfo");
    std::string value(bytes, '\0');
    must(clGetDeviceInfo(device, what, bytes, value.data(), nullptr), "clGetDeviceInfo");
    return value.c_str();
  }
};

class Buffer {
 public:
  Buffer(const Queue& on, size_t bytes, const void* values) {
    cl_int error = CL_SUCCESS;
    buffer_ = clCreateBuffer(on.context, CL_MEM_READ_WRITE, bytes, nullptr, &error);
    must(error, "clCreateBuffer");
    if (values == nullptr) return;
    must(clEnqueueWriteBuffer(on.queue, buffer_, CL_TRUE, 0, bytes, values, 0, nullptr, nullptr),
         "clEnqueueWriteBuffer");
  }
  ~Buffer() { clReleaseMemObject(buffer_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  cl_mem get() const { return buffer_; }

 private:
  cl_mem buffer_ = nullptr;
};

// Random values that every dtype here represents exactly, so that all kernels multiply the same
// numbers.
std::vector<float> random_values(int64_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(n));
  for (float& v : values) v = std::round(normal(random) * 32.0f) / 32.0f;
  return values;
}

std::vector<uint16_t> halves(const std::vector<float>& values) {
  std::vector<uint16_t> bits(values.size());
  std::transform(values.begin(), values.end(), bits.begin(), te_fl::numeric::double_to_fp16);
  return bits;
}

Tensor on_device(const std::vector<float>& values, int64_t rows, int64_t cols, DType dtype,
                 const Device& device) {
  Tensor host = must(Tensor::empty({rows, cols}, dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kF32) {
      static_cast<float*>(host.raw_data())[i] = values[i];
    } else {
      static_cast<uint16_t*>(host.raw_data())[i] = dtype == DType::kF16
                                                       ? te_fl::numeric::double_to_fp16(values[i])
                                                       : te_fl::numeric::double_to_bf16(values[i]);
    }
  }
  return must(host.to(device));
}

double seconds(const std::function<void()>& call, int times, cl_command_queue queue) {
  const auto start = Clock::now();
  for (int i = 0; i < times; ++i) call();
  must(clFinish(queue), "clFinish");
  return std::chrono::duration<double>(Clock::now() - start).count() / times;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

struct Options {
  std::string device = "opencl:0", match, json;
  double seconds = 1.0;  // approximate time of one row
};

class Bench {
 public:
  Bench(const Device& device, const Options& options)
      : device_(device),
        options_(options),
        stream_(must(te_fl::Stream::create(device))),
        queue_(stream_.get()),
        has_half_(queue_.text(CL_DEVICE_EXTENSIONS).find("cl_khr_fp16") != std::string::npos) {}

  int run() {
    const std::string name = queue_.text(CL_DEVICE_NAME) + ", " + queue_.text(CL_DRIVER_VERSION);
    std::printf("device   %s\nCLBlast  %s\n", name.c_str(),
                clblast_.missing.empty() ? clblast_.path.c_str() : clblast_.missing.c_str());
    std::printf("%-26s %-5s %9s %9s %9s %9s %7s %7s\n", "m x n x k", "dtype", "te-fl us", "GFLOP/s",
                "CLBlast", "GFLOP/s", "ratio", "spread");
    for (const Shape& shape : kShapes) {
      for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) row(shape, dtype);
    }
    if (!has_half_) std::printf("f16: the device has no cl_khr_fp16, so CLBlast has no Hgemm\n");
    std::printf("bf16: CLBlast has none; its f32 product of the same shape stands beside it\n");
    if (options_.json.empty()) return 0;
    std::ofstream file(options_.json);
    file << nlohmann::json{{"device", name}, {"clblast", clblast_.path}, {"rows", rows_}}.dump(1)
         << '\n';
    return file.flush() ? 0 : 1;
  }

 private:
  void row(const Shape& s, DType dtype) {
    const std::string label = std::string(s.name) + " " + std::to_string(s.m) + "x" +
                              std::to_string(s.n) + "x" + std::to_string(s.k) +
                              (s.trans_a   ? " tn"
                               : s.trans_b ? " nt"
                                           : " nn");
    const std::string type(te_fl::name(dtype));
    if ((label + " " + type).find(options_.match) == std::string::npos) return;
    if (dtype == DType::kF16 && !has_half_) return;
    const te_fl::StreamScope on(stream_.get());
    const std::vector<float> a = random_values(s.m * s.k, 1), b = random_values(s.k * s.n, 2);
    const Tensor ta = on_device(a, s.trans_a ? s.k : s.m, s.trans_a ? s.m : s.k, dtype, device_);
    const Tensor tb = on_device(b, s.trans_b ? s.n : s.k, s.trans_b ? s.k : s.n, dtype, device_);
    const Tensor td = must(Tensor::empty({s.m, s.n}, dtype, device_));
    const auto ours = [&] {
      must(te_fl::ops::generic_gemm(
          {.a = ta, .b = tb, .d = td, .trans_a = s.trans_a, .trans_b = s.trans_b},
          {.stream = stream_.get()}));
    };
    const auto product = static_cast<size_t>(s.m * s.n);
    const bool half = dtype == DType::kF16;
    std::function<void()> theirs;
    std::vector<uint16_t> ha, hb;
    if (half) ha = halves(a), hb = halves(b);
    const size_t size = half ? 2 : 4;
    const Buffer ba(queue_, a.size() * size, half ? static_cast<const void*>(ha.data()) : a.data());
    const Buffer bb(queue_, b.size() * size, half ? static_cast<const void*>(hb.data()) : b.data());
    const Buffer bd(queue_, product * size, nullptr);
    if (clblast_.missing.empty()) {
      theirs = half ? call(clblast_.half, s, ba, bb, bd, te_fl::numeric::double_to_fp16(1))
                    : call(clblast_.single, s, ba, bb, bd, 1.0f);
    }
    measure(label, type, s, ours, theirs);
    if (dtype == DType::kF32 && theirs) compare(label, td, bd, product);
  }

  template <class Scalar>
  std::function<void()> call(Gemm<Scalar> gemm, const Shape& s, const Buffer& a, const Buffer& b,
                             const Buffer& d, Scalar one) {
    return [this, gemm, &s, &a, &b, &d, one] {
      const int status =
          gemm(kRowMajor, s.trans_a ? kTransposed : kPlain, s.trans_b ? kTransposed : kPlain,
               size_t(s.m), size_t(s.n), size_t(s.k), one, a.get(), 0,
               size_t(s.trans_a ? s.m : s.k), b.get(), 0, size_t(s.trans_b ? s.k : s.n), Scalar{},
               d.get(), 0, size_t(s.n), &queue_.queue, nullptr);
      must(status, "CLBlast's Gemm");
    };
  }

  // Runs the call twice and returns the seconds of the second; the first compiles kernels.
  double first(const std::function<void()>& call) {
    seconds(call, 1, queue_.queue);
    return seconds(call, 1, queue_.queue);
  }

  void measure(const std::string& label, const std::string& type, const Shape& s,
               const std::function<void()>& ours, const std::function<void()>& theirs) {
    const double one = first(ours), other_one = theirs ? first(theirs) : 0;
    const double share = options_.seconds / 9;
    const auto times = [&](double t) {
      return std::clamp(static_cast<int>(share / 2 / t), 1, 400);
    };
    const int samples = std::clamp(static_cast<int>(options_.seconds / (one + other_one)), 3, 9);
    std::vector<double> us, other, ratios;
    for (int i = 0; i < samples; ++i) {
      us.push_back(seconds(ours, times(one), queue_.queue));
      if (!theirs) continue;
      other.push_back(seconds(theirs, times(other_one), queue_.queue));
      ratios.push_back(other.back() / us.back());
    }
    const double flops = 2.0 * double(s.m) * double(s.n) * double(s.k);
    const double mine = median(us);
    nlohmann::json row = {
        {"shape", label}, {"dtype", type}, {"us", mine * 1e6}, {"gflops", flops / mine / 1e9}};
    std::printf("%-26s %-5s %9.1f %9.1f ", label.c_str(), type.c_str(), mine * 1e6,
                flops / mine / 1e9);
    if (theirs) {
      const double peer = median(other), ratio = median(ratios);
      std::sort(ratios.begin(), ratios.end());
      const size_t quarter = ratios.size() / 4;
      const double spread = (ratios[ratios.size() - 1 - quarter] - ratios[quarter]) / 2;
      std::printf("%9.1f %9.1f %7.2f %7.2f", peer * 1e6, flops / peer / 1e9, ratio, spread);
      row.update({{"clblast_us", peer * 1e6},
                  {"clblast_gflops", flops / peer / 1e9},
                  {"ratio", ratio},
                  {"spread", spread}});
    }
    std::printf("\n");
    std::fflush(stdout);
    rows_.push_back(std::move(row));
  }

  // Compares the results of both libraries, which may differ only by the order of summation.
  void compare(const std::string& label, const Tensor& ours, const Buffer& theirs, size_t n) {
    std::vector<float> peer(n);
    must(clEnqueueReadBuffer(queue_.queue, theirs.get(), CL_TRUE, 0, n * sizeof(float), peer.data(),
                             0, nullptr, nullptr),
         "clEnqueueReadBuffer");
    const Tensor host = must(ours.to(Device{}));
    must(te_fl::devices::synchronize(device_, stream_.get()));
    const auto* mine = static_cast<const float*>(host.raw_data());
    double worst = 0, largest = 0;
    for (size_t i = 0; i < n; ++i) {
      worst = std::max(worst, std::abs(double(mine[i]) - double(peer[i])));
      largest = std::max(largest, std::abs(double(peer[i])));
    }
    if (worst <= 1e-4 * largest) return;
    std::fprintf(stderr, "%s: the results differ by %g of %g\n", label.c_str(), worst, largest);
    std::exit(1);
  }

  Device device_;
  const Options& options_;
  te_fl::Stream stream_;
  Queue queue_;
  bool has_half_;
  ClBlast clblast_;
  nlohmann::json rows_ = nlohmann::json::array();
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
    if (flag == "--device" && value != nullptr) {
      options.device = value;
    } else if (flag == "--match" && value != nullptr) {
      options.match = value;
    } else if (flag == "--json" && value != nullptr) {
      options.json = value;
    } else if (flag == "--seconds" && value != nullptr && std::atof(value) > 0) {
      options.seconds = std::atof(value);
    } else {
      std::fprintf(stderr,
                   "usage: opencl_gemm [--device D] [--match TEXT] [--seconds S] [--json F]\n");
      return 2;
    }
  }
  setenv("TE_FL_PER_OP", "generic_gemm=impl:default.opencl", 1);  // never fall back to host copies
  // loads the plugins, which register devices
  te_fl::OpManager::instance();
  return Bench(must(te_fl::parse_device(options.device)), options).run();
}
