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

  // Forgets all choices and reads the file; an empty name means no file. `tune`: choices that the
  // file lacks will be measured and added.
  void configure(const std::string& file, bool tune);
  // The error of the settings with its remedy; empty if there is none.
  std::string error() const;
  bool tunes() const noexcept { return tune_.load(std::memory_order_relaxed); }

  // True if there are no choices. Throws FAILED_PRECONDITION with the text of error(), as find()
  // does.
  bool empty() const;
  // The choice for the device, library, power limit and problem of `key` (find_choice()).
  std::optional<GemmChoice> find(const GemmChoice& key) const;

  // Returns the known choice or, if there is none, that of `measure`, which is added to the file.
  // If another process has added one first, returns that one. One thread at a time measures on a
  // device, because concurrent work would distort the times. The other threads wait, and look again
  // before they measure. Returns nothing if `measure` does. Throws FAILED_PRECONDITION if the file
  // cannot be read or written, and whatever `measure` throws.
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
