// The choices of GEMM algorithms that this process knows, the file behind them, and whose turn it
// is to measure. Plain C++, so that it can be tested where there is no GPU.
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

// Thread-safe. Looking a choice up never waits for a measurement or the disk.
class ChoiceBook {
 public:
  static constexpr int kDevices = 64;

  // Reads the file (empty: there is none) and forgets what was known. `tune`: what it lacks will be
  // measured and added.
  void configure(const std::string& file, bool tune);
  // Says what is wrong with the settings, with the way out; empty if nothing is.
  std::string error() const;
  bool tunes() const noexcept { return tune_.load(std::memory_order_relaxed); }

  // True if nothing can be found. Throws FAILED_PRECONDITION, as find() does, with what error()
  // says.
  bool empty() const;
  // The choice for the device, library, power limit and problem of `key` (find_choice()).
  std::optional<GemmChoice> find(const GemmChoice& key) const;

  // Finds it, too; if there is none, gives what `measure` returns, which is then added to the file;
  // the file's own if another process was faster. One thread at a time measures on a device, as
  // others' work would show in the times: the others wait, and look before they measure whether
  // theirs was measured meanwhile, here or by another process. Nothing if `measure` returns
  // nothing. Throws FAILED_PRECONDITION if the file cannot be read or written, and what `measure`
  // throws.
  std::optional<GemmChoice> find_or_measure(
      int device, const GemmChoice& key, const std::function<std::optional<GemmChoice>()>& measure);

 private:
  void take_up(std::vector<GemmChoice> there);

  mutable std::mutex mutex_;  // of the three below; held for look-ups only
  std::string file_, error_;
  std::vector<GemmChoice> all_;
  std::atomic<bool> tune_{false};
  std::array<std::mutex, kDevices> turns_;
};

}  // namespace te_fl::cuda
