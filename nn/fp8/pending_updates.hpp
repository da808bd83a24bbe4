#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/base/lock_level.hpp"
#include "nn/fp8/fp8_state.hpp"
#include "te_fl/nn/fp8/recipe.hpp"

// Scale updates that are pending, and the modules whose amaxes several ranks share.
namespace te_fl::nn {

class AmaxReduction;

namespace detail {

// Returns a new unique number, from 1.
uint64_t next_number() noexcept;

// A state that was used since its last update, with the recipe and FP8 type of that use.
struct PendingUpdate {
  std::shared_ptr<Fp8State> state;
  DelayedScaling recipe;
  DType dtype = DType::kF8E4M3;
  std::shared_ptr<AmaxReduction> reduction = nullptr;
  uint64_t loads = state == nullptr ? 0 : state->loads();  // load count at the use
  // The running amaxes before a training forward, if inference passes had left some; otherwise
  // undefined.
  Tensor amaxes_before = {};
  // False if the state was loaded or reset since, so that its scales must not be updated.
  bool counts() const noexcept { return loads == state->loads(); }
};

enum class Direction : uint8_t { kForward, kBackward };

// A list of states in the order of first use, each once. The recipe of the latest use applies. Not
// thread-safe.
class PendingUpdates {
 public:
  void add(PendingUpdate update);
  // Like add(), but keeps the existing entry of a state.
  void add_new(PendingUpdate update);
  const std::vector<PendingUpdate>& all() const noexcept { return updates_; }
  std::vector<PendingUpdate> take() { return std::exchange(updates_, {}); }

 private:
  PendingUpdate* find(const Fp8State& state);
  std::vector<PendingUpdate> updates_;
};

// The states that were used under an AmaxReduction, in the order of first use. Thread-safe.
class ReducedSites {
 public:
  // Adds the two states of a module, unless they are in the list.
  void add(const PendingUpdate& forward, const PendingUpdate& backward);
  // The states of a direction, without retired ones.
  std::vector<PendingUpdate> all(Direction direction);

 private:
  const uint64_t number_ = next_number();
  core::Mutex mutex_{core::LockLevel::kReducedSites};
  std::vector<PendingUpdate> forward_, backward_;  // they do not own the reduction
};

}  // namespace detail
}  // namespace te_fl::nn
