#include "gemm_choice.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>

#include "cublaslt.hpp"
#include "cuda_check.hpp"

namespace te_fl::cuda {
namespace {

using nlohmann::json;

struct Choice {
  std::string device, problem;
  size_t library = 0;  // cublasLtGetVersion()
  cublasLtMatmulAlgo_t algo{};
  double us = 0, first_us = 0;  // of the choice, and of the heuristic's first
  int candidates = 0;
};

struct Choices {
  std::mutex mutex;
  std::string file, error;
  bool tune = false;
  std::vector<Choice> all;
};
Choices& choices() {
  static Choices instance;
  return instance;
}

constexpr size_t kWords = sizeof(cublasLtMatmulAlgo_t) / sizeof(uint64_t);

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

std::vector<Choice> parse(const json& root) {
  if (root.at("format") != 1) throw std::runtime_error("\"format\" is not 1");
  std::vector<Choice> result;
  for (const json& entry : root.at("choices")) {
    Choice c;
    c.device = entry.at("device");
    c.problem = entry.at("problem");
    c.library = entry.at("cublaslt");
    const auto words = entry.at("algorithm").get<std::vector<uint64_t>>();
    if (words.size() != kWords) {
      throw std::runtime_error("\"algorithm\" of " + c.problem + " has " +
                               std::to_string(words.size()) + " numbers; it must have " +
                               std::to_string(kWords));
    }
    std::memcpy(&c.algo, words.data(), sizeof c.algo);
    c.us = entry.value("us", 0.0);
    c.first_us = entry.value("heuristic_us", 0.0);
    c.candidates = entry.value("candidates", 0);
    result.push_back(std::move(c));
  }
  return result;
}

json as_json(const Choice& c) {
  std::array<uint64_t, kWords> words;
  std::memcpy(words.data(), &c.algo, sizeof c.algo);
  return {{"device", c.device}, {"problem", c.problem},       {"cublaslt", c.library},
          {"us", c.us},         {"heuristic_us", c.first_us}, {"candidates", c.candidates},
          {"algorithm", words}};
}

// The caller holds the lock.
void save(const Choices& all) {
  json list = json::array();
  for (const Choice& c : all.all) list.push_back(as_json(c));
  const std::string text = json{{"format", 1}, {"choices", list}}.dump(1) + "\n";
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

// A chip under load lowers its clock until it draws no more power than it may, so in a training run
// the candidate that wins is the one that needs the least energy, and short or cold measurements
// find another.
constexpr double kHeatUs = 500000;     // before anything of a device is measured
constexpr double kLookUs = 10000;      // of every candidate, once
constexpr double kSequenceUs = 60000;  // of one of the fastest in one round
constexpr size_t kFinalists = 4;
constexpr double kFinalistSlack = 1.06;  // of the fastest look
constexpr int kRounds = 5;

class Measurement {
 public:
  Measurement(const std::vector<cublasLtMatmulAlgo_t>& candidates,
              const std::function<bool(const cublasLtMatmulAlgo_t&)>& run, cudaStream_t stream)
      : candidates_(candidates), run_(run), timer_(stream), us_(candidates.size(), -1) {}

  // Microseconds per run of each, negative for those that the library refuses.
  const std::vector<double>& look() {
    for (size_t i = 0; i < us_.size(); ++i) {
      if (sequence(i, 0) >= 0) us_[i] = sequence(i, kLookUs);
    }
    return us_;
  }
  void heat() {
    for (size_t i = 0; i < us_.size(); ++i) {
      if (sequence(i, kHeatUs) >= 0) return;
    }
  }
  // Of those that looked fastest, the one with the smallest median in rounds that take turns.
  size_t fastest() {
    std::vector<size_t> finalists;
    for (size_t i = 0; i < us_.size(); ++i) {
      if (us_[i] >= 0) finalists.push_back(i);
    }
    std::sort(finalists.begin(), finalists.end(),
              [this](size_t a, size_t b) { return us_[a] < us_[b]; });
    const double most = us_[finalists.front()] * kFinalistSlack;
    while (finalists.size() > kFinalists || us_[finalists.back()] > most) finalists.pop_back();
    std::vector<std::vector<double>> times(finalists.size());
    for (int round = 0; round < kRounds; ++round) {
      for (size_t i = 0; i < finalists.size(); ++i) {
        times[i].push_back(sequence(finalists[i], kSequenceUs));
      }
    }
    for (size_t i = 0; i < finalists.size(); ++i) {
      std::nth_element(times[i].begin(), times[i].begin() + kRounds / 2, times[i].end());
      us_[finalists[i]] = times[i][kRounds / 2];
    }
    return *std::min_element(finalists.begin(), finalists.end(),
                             [this](size_t a, size_t b) { return us_[a] < us_[b]; });
  }

 private:
  // Runs a candidate for about so long, at least three times; microseconds of one, negative if the
  // library refuses it.
  double sequence(size_t i, double us) {
    const auto once = [&] { return run_(candidates_[i]); };
    const double first = us_[i] > 0 ? us_[i] : timer_.time(1, once);
    if (first < 0) return -1;
    return timer_.time(std::clamp(static_cast<int>(us / std::max(first, 1.0)), 3, 50000), once);
  }

  const std::vector<cublasLtMatmulAlgo_t>& candidates_;
  const std::function<bool(const cublasLtMatmulAlgo_t&)>& run_;
  Timer timer_;
  std::vector<double> us_;
};

}  // namespace

void configure_gemm_choices(const char* file, bool tune) {
  Choices& all = choices();
  const std::lock_guard lock(all.mutex);
  all.file = file != nullptr ? file : "";
  all.tune = tune;
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
    all.all = parse(json::parse(in));
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
  for (const Choice& c : all.all) {
    if (c.problem != problem || c.library != library || c.device != name) continue;
    algo = c.algo;
    return true;
  }
  return false;
}

size_t measure_gemm_choice(int device, const std::string& problem,
                           const std::vector<cublasLtMatmulAlgo_t>& candidates,
                           const std::function<bool(const cublasLtMatmulAlgo_t&)>& run,
                           cudaStream_t stream) {
  Choices& all = choices();
  const std::lock_guard lock(all.mutex);
  Measurement measurement(candidates, run, stream);
  static std::set<int> hot;
  if (hot.insert(device).second) measurement.heat();
  const std::vector<double>& us = measurement.look();
  const auto timed = std::count_if(us.begin(), us.end(), [](double t) { return t >= 0; });
  if (timed == 0) return 0;
  const size_t chosen = measurement.fastest();
  all.all.push_back({device_name(device), problem, cublaslt()->version(), candidates[chosen],
                     us[chosen], us[0], static_cast<int>(timed)});
  save(all);
  return chosen;
}

}  // namespace te_fl::cuda
