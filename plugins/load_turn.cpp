#include "plugins/load_turn.hpp"

#include <atomic>
#include <utility>

#include "core/base/fork.hpp"

namespace te_fl::plugins {
namespace {

std::atomic<int> g_turn{0};
constinit thread_local bool t_turn = false;

// The thread that had the turn is not in the child, unless it is the one that forked.
void turn_in_child() {
  if (!t_turn) g_turn.store(0, std::memory_order_relaxed);
}
const core::ForkedChild turn_watched(core::LockLevel::kPluginRecords, &turn_in_child);

}  // namespace

LoadTurn::LoadTurn() {
  int free = 0;
  while (!g_turn.compare_exchange_weak(free, 1, std::memory_order_acquire)) {
    if (free != 0) g_turn.wait(1, std::memory_order_relaxed);
    free = 0;
  }
  t_turn = true;
}

LoadTurn::~LoadTurn() {
  t_turn = false;
  g_turn.store(0, std::memory_order_release);
  g_turn.notify_one();
}

bool LoadTurn::mine() noexcept { return t_turn; }

LoadTurn::Lent::Lent() noexcept : before_(std::exchange(t_turn, true)) {}
LoadTurn::Lent::~Lent() { t_turn = before_; }

}  // namespace te_fl::plugins
