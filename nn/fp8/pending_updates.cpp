#include "nn/fp8/pending_updates.hpp"

#include <algorithm>
#include <atomic>

namespace te_fl::nn::detail {

PendingUpdate* PendingUpdates::find(const Fp8State& state) {
  auto found = std::find_if(updates_.begin(), updates_.end(),
                            [&](const PendingUpdate& u) { return u.state->same(state); });
  return found == updates_.end() ? nullptr : &*found;
}

void PendingUpdates::add(PendingUpdate update) {
  if (PendingUpdate* found = find(*update.state)) {
    if (found->loads == update.loads) update.amaxes_before = found->amaxes_before;
    *found = std::move(update);
  } else {
    updates_.push_back(std::move(update));
  }
}

void PendingUpdates::add_new(PendingUpdate update) {
  if (find(*update.state) == nullptr) updates_.push_back(std::move(update));
}

void ReducedSites::add(const PendingUpdate& forward, const PendingUpdate& backward) {
  if (forward.state->reduced_by().exchange(number_) == number_) return;
  const std::lock_guard lock(mutex_);
  forward_.push_back({forward.state, forward.recipe, forward.dtype});
  backward_.push_back({backward.state, backward.recipe, backward.dtype});
}

std::vector<PendingUpdate> ReducedSites::all(Direction direction) {
  const std::lock_guard lock(mutex_);
  for (auto* sites : {&forward_, &backward_}) {
    std::erase_if(*sites, [](const PendingUpdate& site) { return site.state->retired(); });
    for (PendingUpdate& site : *sites) site.loads = site.state->loads();
  }
  return direction == Direction::kForward ? forward_ : backward_;
}

uint64_t next_number() noexcept {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

}  // namespace te_fl::nn::detail
