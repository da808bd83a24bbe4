#include "gemm/gemm_algorithm.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "device/cuda_check.hpp"
#include "device/nvml.hpp"
#include "gemm/cublaslt.hpp"
#include "gemm/gemm_algorithm_book.hpp"
#include "gemm/gemm_selection.hpp"
#include "gemm/gemm_space.hpp"

namespace te_fl::cuda {
namespace {

static_assert(sizeof(cublasLtMatmulAlgo_t) == sizeof GemmChoice{}.algorithm);

ChoiceBook& book() {
  static ChoiceBook instance;
  return instance;
}
constinit std::atomic<const te_fl_host_api*> g_host{nullptr};

const std::string& device_name(int device) {
  static std::mutex mutex;
  static std::map<int, std::string> names;
  const std::lock_guard lock(mutex);
  std::string& name = names[device];
  if (name.empty()) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    name = properties.name;
  }
  return name;
}

// Returns the key under which the algorithm choice of a problem is stored: device, power limit,
// library version and problem.
GemmChoice make_key(int device, const std::string& problem) {
  GemmChoice key;
  key.device = device_name(device);
  key.problem = problem;
  key.library = cublaslt()->version();
  key.power_limit = power_limit(device);
  return key;
}

cublasLtMatmulAlgo_t algorithm_from(const GemmChoice& choice) {
  cublasLtMatmulAlgo_t algo;
  std::memcpy(&algo, choice.algorithm.data(), sizeof algo);
  return algo;
}

// A map from device and problem to the algorithm that cuBLASLt's heuristic returned. Cleared when
// it is full.
class Named {
 public:
  void add(int device, const std::string& problem, const cublasLtMatmulAlgo_t& algo) {
    const std::lock_guard lock(mutex_);
    if (all_.size() == kMost) all_.clear();
    all_.insert_or_assign({device, problem}, algo);
  }
  std::optional<cublasLtMatmulAlgo_t> find(int device, const std::string& problem) const {
    const std::lock_guard lock(mutex_);
    const auto found = all_.find({device, problem});
    return found != all_.end() ? std::optional(found->second) : std::nullopt;
  }

 private:
  static constexpr size_t kMost = 4096;
  mutable std::mutex mutex_;
  std::map<std::pair<int, std::string>, cublasLtMatmulAlgo_t> all_;
};
Named& named() {
  static Named instance;
  return instance;
}

class Timer {
 public:
  explicit Timer(cudaStream_t stream) : stream_(stream) {
    check(cudaEventCreate(&begin_), "cudaEventCreate");
    check(cudaEventCreate(&end_), "cudaEventCreate");
  }
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  // Returns the microseconds per run over `count` runs; negative if the library refused a run.
  template <class F>
  double time(int count, F&& run) {
    check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
    for (int i = 0; i < count; ++i) {
      if (!run()) return -1;
    }
    check(cudaEventRecord(end_, stream_), "cudaEventRecord");
    check(cudaEventSynchronize(end_), "cudaEventSynchronize");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
    return 1000.0 * static_cast<double>(ms) / count;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

constexpr double kHeatUs = 500000;  // microseconds of load before the first measurement on a device

// Runs the GEMM until the device is warm. Does so only before the first measurement on a device.
void heat(int device, Timer& timer, const std::function<bool()>& run) {
  static std::array<std::atomic<bool>, ChoiceBook::kDevices> hot{};
  if (hot.at(static_cast<size_t>(device)).exchange(true)) return;
  timer.time(1, run);  // the first run loads the kernel
  if (const double us = timer.time(1, run); us > 0) {
    timer.time(std::clamp(static_cast<int>(kHeatUs / us), 1, 50000), run);
  }
}

}  // namespace

void configure_gemm_choices(const char* file, bool tune, const te_fl_host_api* host) {
  g_host = host;
  book().configure(file != nullptr ? file : "", tune);
}

std::string gemm_choices_error() { return book().error(); }

bool tunes_gemm() noexcept { return book().tunes(); }

bool find_gemm_choice(int device, const std::string& problem, cublasLtMatmulAlgo_t& algo) {
  if (book().empty()) return false;
  const std::optional<GemmChoice> found = book().find(make_key(device, problem));
  if (found) algo = algorithm_from(*found);
  return found.has_value();
}

void note_algorithm(int device, const std::string& problem, const cublasLtMatmulAlgo_t& algo) {
  named().add(device, problem, algo);
}

std::string algorithm_words(int device, const std::string& problem, bool measurable) {
  cublasLtMatmulAlgo_t algo;
  if (find_gemm_choice(device, problem, algo)) {
    return to_text(algo) + ": the choice of TE_FL_CUDA_GEMM_FILE";
  }
  if (const auto found = named().find(device, problem)) {
    return to_text(*found) + ": the first of cuBLASLt's heuristic";
  }
  return measurable && tunes_gemm() ? "measured at first use (TE_FL_CUDA_GEMM_TUNE)"
                                    : "chosen by cuBLASLt's heuristic at first use";
}

std::optional<GemmChoice> time_candidates(int device, const std::string& problem,
                                          const std::vector<cublasLtMatmulAlgo_t>& candidates,
                                          const GemmTrial& trial, cudaStream_t stream) {
  Timer timer(stream);
  heat(device, timer, [&] { return trial.run(candidates[0]); });
  const auto time = [&](size_t i, int runs) {
    return timer.time(runs, [&] { return trial.run(candidates[i]); });
  };
  const Winner winner = select_fastest(candidates.size(), {time, trial.agrees});
  if (winner.timed == 0) return std::nullopt;
  GemmChoice choice = make_key(device, problem);
  choice.config = to_text(candidates[winner.index]);
  choice.us = winner.us;
  choice.first_us = winner.first_us;
  choice.candidates = winner.timed;
  choice.different = winner.different;
  std::memcpy(choice.algorithm.data(), &candidates[winner.index], sizeof choice.algorithm);
  return choice;
}

cublasLtMatmulAlgo_t measured_gemm_choice(
    int device, const std::string& problem, const cublasLtMatmulAlgo_t& otherwise,
    const std::function<std::optional<GemmChoice>()>& measure) {
  const auto choice = book().find_or_measure(device, make_key(device, problem), measure);
  return choice ? algorithm_from(*choice) : otherwise;
}

void warn_not_measured(const std::string& problem, const char* why) {
  const te_fl_host_api* host = g_host;
  if (host == nullptr || host->log == nullptr) return;
  const std::string text = problem + " takes the algorithm of cuBLASLt's heuristic, as measuring " +
                           "others failed: " + why;
  host->log(host->host, TE_FL_LOG_WARNING, text.c_str());
}

}  // namespace te_fl::cuda
