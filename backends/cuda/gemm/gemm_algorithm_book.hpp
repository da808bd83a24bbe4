// The GEMM algorithm choices that this process knows, the file that stores them, and the locks that
// serialise measurements. Plain C++, so tests run without a GPU.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "gemm/gemm_algorithm_file.hpp"

namespace te_fl::cuda {

// Thread-safe. find() never waits for a measurement or the disk.
class ChoiceBook {
 public:
  static constexpr int kDevices = 64;

  // Discards all choices and reads the file; an empty name means no file. `tune`: choices that the
  // file lacks will be measured and added.
  void configure(const std::string& file, bool tune);
  // Returns the error in the settings and its remedy; empty if there is no error.
  std::string error() const;
  bool tunes() const noexcept { return tune_.load(std::memory_order_relaxed); }

  // True if there are no choices. Throws FAILED_PRECONDITION with the text of error(), as find()
  // does.
  bool empty() const;
  // Returns the choice for the device, library, power limit and problem of `key` (find_choice()).
  std::optional<GemmChoice> find(const GemmChoice& key) const;

  // Returns the known choice or, if there is none, the result of `measure`, which is added to the
  // file. If another process has already added a choice to the file, returns that choice instead.
  // One thread at a time measures on a device, because concurrent work would distort the times;
  // other threads wait, and repeat the look-up before they measure. Returns nullopt if `measure`
  // returns nullopt. Throws FAILED_PRECONDITION if the file cannot be read or written, and whatever
  // `measure` throws.
  std::optional<GemmChoice> find_or_measure(
      int device, const GemmChoice& key, const std::function<std::optional<GemmChoice>()>& measure);

 private:
  void take_up(std::vector<GemmChoice> there);

  mutable std::mutex mutex_;  // guards file_, error_ and all_; held for look-ups only
  std::string file_, error_;
  std::vector<GemmChoice> all_;
  std::atomic<bool> tune_{false};
  std::array<std::mutex, kDevices> turns_;
};

}  // namespace te_fl::cuda
