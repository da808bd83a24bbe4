#include "plugins/load_turn.hpp"

#include <atomic>
#include <thread>
#include <utility>

#include "core/base/fork.hpp"
#include "core/base/process_end.hpp"

namespace te_fl::plugins {
namespace {

std::atomic<int> g_turn{0};
constinit thread_local bool t_turn = false;

// In a forked child: frees the turn (the lock of LoadTurn) if a thread other than the forking one
// had it.
void turn_in_child() {
  if (!t_turn) g_turn.store(0, std::memory_order_relaxed);
}
const core::ForkedChild turn_watched(core::LockLevel::kPluginRecords, &turn_in_child);

// Waits until no other thread holds the LoadTurn, without taking it: a load that begins later sees
// that the process is ending.
void wait_for_loads(core::EndClock::time_point end) noexcept {
  while (g_turn.load(std::memory_order_seq_cst) != 0 && !t_turn && core::EndClock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}
[[maybe_unused]] const bool end_hooked =
    (core::g_wait_for_loads.store(&wait_for_loads, std::memory_order_release), true);

}  // namespace

LoadTurn::LoadTurn() {
  core::watch_thread_end();
  core::wait_for_main_to_exit();
  int free = 0;
  while (!g_turn.compare_exchange_weak(free, 1, std::memory_order_seq_cst)) {
    if (free != 0) g_turn.wait(1, std::memory_order_relaxed);
    free = 0;
  }
  t_turn = true;
}

LoadTurn::~LoadTurn() {
  core::watch_exit();
  t_turn = false;
  g_turn.store(0, std::memory_order_release);
  g_turn.notify_one();
}

bool LoadTurn::mine() noexcept { return t_turn; }

LoadTurn::Lent::Lent() noexcept : before_(std::exchange(t_turn, true)) {}
LoadTurn::Lent::~Lent() { t_turn = before_; }

}  // namespace te_fl::plugins
