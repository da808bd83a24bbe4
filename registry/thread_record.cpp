#include "registry/thread_record.hpp"

#include <linux/membarrier.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <new>

#include "core/base/fork.hpp"
#include "core/base/process_end.hpp"
#include "core/device/inside.hpp"

namespace te_fl::registry {

constinit thread_local ThreadRecord* t_record = nullptr;
EpochCounter g_epoch;

namespace {

// Guards the list of thread records. No plugin is called while it is held.
constinit core::ForkMutex threads_mutex(core::LockLevel::kThreadRecords);
const core::ForkMutex::Registration threads_registration(threads_mutex);

// All live thread records, and the call counts of ended threads. Never freed: threads may run after
// static destruction.
struct Threads {
  std::vector<ThreadRecord*> records;
  std::vector<uint64_t> ended;  // counts of ended threads, by counter index
  std::vector<uint32_t> free_counters;
  uint32_t next_counter = 0;
  pthread_key_t key{};
};

// The records that crash handlers can read without a lock. Threads beyond their number are not
// visible.
constinit std::array<std::atomic<ThreadRecord*>, 256> g_visible{};

// Replaces a null slot by `to`, or the slot of `from` by null.
void change_visible(ThreadRecord* from, ThreadRecord* to) noexcept {
  for (auto& slot : g_visible) {
    ThreadRecord* expected = from;
    if (slot.compare_exchange_strong(expected, to)) return;
  }
}

bool register_membarrier() {
#if defined(__SANITIZE_THREAD__)
  return false;  // TSan does not model membarrier
#else
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
  return false;
#endif
#endif
  return syscall(__NR_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0;
#endif
}

void end_thread(void* record);

Threads& threads() {
  static Threads* const all = [] {
    auto* made = new Threads;
    // A pthread key instead of a thread_local object: its destructor runs after those of
    // thread_local objects, which may still call ops.
    pthread_key_create(&made->key, end_thread);
    g_epoch.asymmetric.store(register_membarrier(), std::memory_order_relaxed);
    return made;
  }();
  return *all;
}
// Initialised when the library is loaded. With lazy initialisation, a child forked during it would
// wait for a thread that it does not have.
[[maybe_unused]] const Threads& threads_made_at_load = threads();

// Adds a record's counts to `ended`. The caller holds the lock.
void keep_counts(Threads& all, const ThreadRecord& record) {
  all.ended.resize(all.next_counter);
  for (uint32_t i = 0; i < all.next_counter; ++i) all.ended[i] += record.counters.read(i);
}

void end_thread(void* raw) {
  auto* record = static_cast<ThreadRecord*>(raw);
  t_record = nullptr;
  change_visible(record, nullptr);
  Threads& all = threads();
  {
    std::lock_guard lock(threads_mutex);
    std::erase(all.records, record);
    keep_counts(all, *record);
  }
  delete record;
}

// A full fence for all threads: orders their earlier stores before our later loads, and our earlier
// stores before their later loads.
void heavy_fence() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (g_epoch.asymmetric.load(std::memory_order_relaxed)) {
    syscall(__NR_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
  }
}

}  // namespace

ThreadRecord& make_thread_record() {
  Threads& all = threads();
  auto* record = new ThreadRecord;
  {
    std::lock_guard lock(threads_mutex);
    all.records.push_back(record);
  }
  change_visible(nullptr, record);
  pthread_setspecific(all.key, record);
  core::watch_thread_end();
  t_record = record;
  return *record;
}

bool inside_op() noexcept { return t_record != nullptr && t_record->slot.depth != 0; }

uint64_t retire() { return g_epoch.value.fetch_add(1, std::memory_order_seq_cst); }

uint64_t oldest_inside() {
  Threads& all = threads();
  // Reads the epoch before the threads. A thread that enters after its slot was read may use
  // objects that are unpublished later, so no object retired from now on may count as dead.
  uint64_t oldest = g_epoch.value.load(std::memory_order_seq_cst);
  heavy_fence();
  std::lock_guard lock(threads_mutex);
  for (const ThreadRecord* record : all.records) {
    const uint64_t entered = record->slot.epoch.load(std::memory_order_seq_cst);
    if (entered != 0) oldest = std::min(oldest, entered);
  }
  return oldest;
}

namespace {

// Waits a little between two polls.
void pause(int round) {
  if (round < 64) {
    sched_yield();
  } else {
    usleep(100);
  }
}

bool others_inside() {
  Threads& all = threads();
  heavy_fence();
  std::lock_guard lock(threads_mutex);
  return std::any_of(all.records.begin(), all.records.end(), [](const ThreadRecord* record) {
    return record != t_record && record->slot.epoch.load(std::memory_order_seq_cst) != 0;
  });
}

// Waits, at most until `end`, until no other thread is inside an op or a device function. A thread
// that enters one later sees that the process is ending, and leaves at once.
void wait_for_calls(core::EndClock::time_point end) noexcept {
  for (int round = 0; others_inside() && core::EndClock::now() < end; ++round) pause(round);
}
[[maybe_unused]] const bool end_hooked =
    (core::g_wait_for_calls.store(&wait_for_calls, std::memory_order_release), true);

}  // namespace

void wait_quiescent(uint64_t epoch) {
  for (int round = 0; oldest_inside() <= epoch; ++round) pause(round);
}

namespace {

// The hooks that core/device uses to mark threads as inside device functions.
const core::InsideHooks inside_hooks{
    [] { enter(this_thread().slot); },
    []() noexcept { leave(t_record->slot); },
    []() noexcept { return inside_op(); },
    [] { wait_quiescent(retire()); },
};
[[maybe_unused]] const bool inside_hooked =
    (core::g_inside.store(&inside_hooks, std::memory_order_release), true);

}  // namespace

CallCounters::~CallCounters() {
  for (auto& chunk : chunks_) delete chunk.load(std::memory_order_relaxed);
}

std::atomic<uint64_t>* CallCounters::at(uint32_t index) {
  if (index >= kChunk * kChunks) return nullptr;
  auto& slot = chunks_[index / kChunk];
  Chunk* chunk = slot.load(std::memory_order_relaxed);
  if (chunk == nullptr) {
    chunk = new Chunk{};
    slot.store(chunk, std::memory_order_release);
  }
  return &(*chunk)[index % kChunk];
}

uint64_t CallCounters::read(uint32_t index) const noexcept {
  if (index >= kChunk * kChunks) return 0;
  const Chunk* chunk = chunks_[index / kChunk].load(std::memory_order_acquire);
  return chunk == nullptr ? 0 : (*chunk)[index % kChunk].load(std::memory_order_relaxed);
}

void CallCounters::clear(uint32_t index) noexcept {
  if (index >= kChunk * kChunks) return;
  Chunk* chunk = chunks_[index / kChunk].load(std::memory_order_acquire);
  if (chunk != nullptr) (*chunk)[index % kChunk].store(0, std::memory_order_relaxed);
}

uint32_t allocate_counter() {
  Threads& all = threads();
  std::lock_guard lock(threads_mutex);
  if (all.free_counters.empty()) return all.next_counter++;
  const uint32_t index = all.free_counters.back();
  all.free_counters.pop_back();
  return index;
}

void free_counter(uint32_t index) {
  Threads& all = threads();
  std::lock_guard lock(threads_mutex);
  for (ThreadRecord* record : all.records) record->counters.clear(index);
  if (index < all.ended.size()) all.ended[index] = 0;
  all.free_counters.push_back(index);
}

uint64_t read_counter(uint32_t index) {
  Threads& all = threads();
  std::lock_guard lock(threads_mutex);
  uint64_t sum = index < all.ended.size() ? all.ended[index] : 0;
  for (const ThreadRecord* record : all.records) sum += record->counters.read(index);
  return sum;
}

void for_each_visible_thread(void (*f)(const ThreadRecord& record, void* context), void* context) {
  for (const auto& slot : g_visible) {
    const ThreadRecord* record = slot.load(std::memory_order_acquire);
    if (record != nullptr) f(*record, context);
  }
}

size_t thread_record_count() {
  Threads& all = threads();
  std::lock_guard lock(threads_mutex);
  return all.records.size();
}

namespace {

// Run in a forked child, where the other threads of the parent do not exist.
void forget_other_threads() {
  Threads& all = threads();
  // The records of other threads may have been copied in the middle of a change, so they are
  // neither read for epochs nor freed.
  for (const ThreadRecord* record : all.records) {
    if (record != t_record) keep_counts(all, *record);
  }
  all.records.clear();
  for (auto& slot : g_visible) slot.store(nullptr);
  if (t_record != nullptr) {
    all.records.push_back(t_record);
    change_visible(nullptr, t_record);
  }
  g_epoch.asymmetric.store(register_membarrier(), std::memory_order_relaxed);
}
const core::ForkedChild threads_forked_child(core::LockLevel::kThreadRecords,
                                             &forget_other_threads);

}  // namespace
}  // namespace te_fl::registry
