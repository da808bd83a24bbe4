#include "gemm_choice.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <set>

#include "cublaslt.hpp"
#include "cuda_check.hpp"
#include "gemm_choice_file.hpp"
#include "gemm_selection.hpp"
#include "gemm_space.hpp"

namespace te_fl::cuda {
namespace {

static_assert(sizeof(cublasLtMatmulAlgo_t) == sizeof GemmChoice{}.algorithm);

struct Choices {
  std::mutex mutex;
  std::string file, error;
  bool tune = false;
  const te_fl_host_api* host = nullptr;
  std::vector<GemmChoice> all;
};
Choices& choices() {
  static Choices instance;
  return instance;
}

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

// The caller holds the lock.
void save(const Choices& all) {
  const std::string text = gemm_choices_text(all.all);
  // Of this process: ranks that share the file write one after the other, and the last one's stays.
  const std::string made = all.file + "." + std::to_string(getpid()) + ".new";
  std::ofstream out(made, std::ios::trunc);
  out << text;
  out.close();
  if (!out || std::rename(made.c_str(), all.file.c_str()) != 0) {
    const std::string why = std::strerror(errno);
    std::remove(made.c_str());
    throw backend::Error(TE_FL_FAILED_PRECONDITION | TE_FL_CLEAN,
                         "TE_FL_CUDA_GEMM_FILE: " + all.file + " cannot be written: " + why +
                             "; name a file in a folder that can be");
  }
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
  // Microseconds per run of `count`; negative if one was refused.
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

constexpr double kHeatUs = 500000;  // before anything of a device is measured

// The first measurement on a device finds it cold.
void heat(int device, Timer& timer, const std::function<bool()>& run) {
  static std::set<int> hot;
  if (!hot.insert(device).second) return;
  timer.time(1, run);  // loads the kernel
  if (const double us = timer.time(1, run); us > 0) {
    timer.time(std::clamp(static_cast<int>(kHeatUs / us), 1, 50000), run);
  }
}

}  // namespace

void configure_gemm_choices(const char* file, bool tune, const te_fl_host_api* host) {
  Choices& all = choices();
  const std::lock_guard lock(all.mutex);
  all.file = file != nullptr ? file : "";
  all.tune = tune;
  all.host = host;
  all.all.clear();
  all.error.clear();
  if (all.file.empty()) {
    if (tune) {
      all.error =
          "TE_FL_CUDA_GEMM_TUNE is 1 and TE_FL_CUDA_GEMM_FILE is unset; name the file that "
          "the choices go to, or leave the measuring out";
    }
    return;
  }
  std::ifstream in(all.file);
  if (!in) {
    if (!tune) {
      all.error =
          "TE_FL_CUDA_GEMM_FILE: " + all.file +
          " cannot be read; name a file that TE_FL_CUDA_GEMM_TUNE=1 has written, or unset it";
    }
    return;
  }
  try {
    all.all = parse_gemm_choices(in);
  } catch (const std::exception& e) {
    all.error = "TE_FL_CUDA_GEMM_FILE: " + all.file + " is not a file of choices: " + e.what() +
                "; remove it and measure again with TE_FL_CUDA_GEMM_TUNE=1";
  }
}

std::string gemm_choices_error() {
  Choices& all = choices();
  const std::lock_guard lock(all.mutex);
  return all.error;
}

bool tunes_gemm() noexcept { return choices().tune; }

bool find_gemm_choice(int device, const std::string& problem, cublasLtMatmulAlgo_t& algo) {
  Choices& all = choices();
  const std::lock_guard lock(all.mutex);
  if (!all.error.empty()) {
    throw backend::Error(TE_FL_FAILED_PRECONDITION | TE_FL_CLEAN, all.error);
  }
  if (all.all.empty()) return false;
  const std::string& name = device_name(device);
  const size_t library = cublaslt()->version();
  for (const GemmChoice& c : all.all) {
    if (c.problem != problem || c.library != library || c.device != name) continue;
    std::memcpy(&algo, c.algorithm.data(), sizeof algo);
    return true;
  }
  return false;
}

size_t measure_gemm_choice(int device, const std::string& problem,
                           const std::vector<cublasLtMatmulAlgo_t>& candidates,
                           const GemmTrial& trial, cudaStream_t stream) {
  Choices& all = choices();
  const std::lock_guard lock(all.mutex);
  Timer timer(stream);
  heat(device, timer, [&] { return trial.run(candidates[0]); });
  const auto time = [&](size_t i, int runs) {
    return timer.time(runs, [&] { return trial.run(candidates[i]); });
  };
  const Winner winner = select_fastest(candidates.size(), {time, trial.agrees});
  if (winner.timed == 0) return 0;
  GemmChoice choice{device_name(device),
                    problem,
                    cublaslt()->version(),
                    {},
                    text_of(candidates[winner.index]),
                    winner.us,
                    winner.first_us,
                    winner.timed,
                    winner.different};
  std::memcpy(choice.algorithm.data(), &candidates[winner.index], sizeof choice.algorithm);
  all.all.push_back(std::move(choice));
  save(all);
  return winner.index;
}

void warn_not_measured(const std::string& problem, const char* why) {
  Choices& all = choices();
  const std::lock_guard lock(all.mutex);
  if (all.host == nullptr || all.host->log == nullptr) return;
  const std::string text = problem + " takes the algorithm of cuBLASLt's heuristic, as measuring " +
                           "others failed: " + why;
  all.host->log(all.host->host, TE_FL_LOG_WARNING, text.c_str());
}

}  // namespace te_fl::cuda
