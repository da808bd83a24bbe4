#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/base/lock_level.hpp"
#include "nn/fp8/fp8_state.hpp"
#include "te_fl/nn/fp8/recipe.hpp"

// Scales that wait for their update, and the sites whose amaxes several ranks share.
namespace te_fl::nn {

class AmaxReduction;

namespace detail {

// Numbers that are never used again, from 1.
uint64_t next_number() noexcept;

// FP8 state used since the last update, with the recipe and the FP8 type it was used with.
struct PendingUpdate {
  std::shared_ptr<Fp8State> state;
  DelayedScaling recipe;
  DType dtype = DType::kF8E4M3;
  std::shared_ptr<AmaxReduction> reduction = nullptr;
  uint64_t loads = state == nullptr ? 0 : state->loads();  // when it was used
  // The running amaxes before a training forward, if inferences had left some; else undefined.
  Tensor amaxes_before = {};
  // False: the state was loaded or reset since, and its scales are what was loaded.
  bool counts() const noexcept { return loads == state->loads(); }
};

enum class Direction : uint8_t { kForward, kBackward };

// Each state once, in order of first use; a later use's recipe wins. Not thread-safe.
class PendingUpdates {
 public:
  void add(PendingUpdate update);
  // As add(), unless the state is there already.
  void add_new(PendingUpdate update);
  const std::vector<PendingUpdate>& all() const noexcept { return updates_; }
  std::vector<PendingUpdate> take() { return std::exchange(updates_, {}); }

 private:
  PendingUpdate* find(const Fp8State& state);
  std::vector<PendingUpdate> updates_;
};

// The sites that were used under an AmaxReduction, in the order of their first use. Thread-safe.
class ReducedSites {
 public:
  // Adds a site with its two states unless it is there.
  void add(const PendingUpdate& forward, const PendingUpdate& backward);
  // Without those that are retired.
  std::vector<PendingUpdate> all(Direction direction);

 private:
  const uint64_t number_ = next_number();
  core::Mutex mutex_{core::LockLevel::kReducedSites};
  std::vector<PendingUpdate> forward_, backward_;  // they do not keep the reduction
};

}  // namespace detail
}  // namespace te_fl::nn
