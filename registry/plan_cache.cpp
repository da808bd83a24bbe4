#include "registry/plan_cache.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <iterator>
#include <mutex>
#include <thread>
#include <unordered_set>
#include <utility>

#include "core/base/abi_struct.hpp"
#include "core/base/fork.hpp"
#include "core/op/call_words.hpp"
#include "registry/arguments.hpp"
#include "registry/epoch.hpp"
#include "registry/implementation.hpp"
#include "te_fl/log.hpp"

namespace te_fl::registry {

std::atomic<uint64_t> g_plan_generation{1};
std::atomic<uint64_t> g_plan_tick{0};

namespace {

// Guards all PlanCaches. No plugin is called while it is held.
constinit core::ForkMutex plans_mutex(core::LockLevel::kPlans);
const core::ForkMutex::Registration plans_registration(plans_mutex);

// log2 of the address's alignment, at most 8; 9 for a null address.
uint64_t alignment_of(uint64_t address) noexcept {
  return address == 0 ? 9 : static_cast<uint64_t>(std::min(__builtin_ctzll(address), 8));
}

using StreamOf = std::pair<Device, void*>;

// The existing plans that have streams or are part of a graph, whichever cache they are in.
// leave_stream() and note_launch() iterate over them. The lock guards this set.
std::unordered_set<const Plan*>& live_plans() {
  static auto* const all = new std::unordered_set<const Plan*>;
  return *all;
}

// The streams that threads are querying without the lock. While a stream is in this list, no plan
// drops it, and leave_stream() waits. The lock guards the list.
std::vector<StreamOf>& queried_streams() {
  static auto* const all = new std::vector<StreamOf>;
  return *all;
}

bool is_among(const std::vector<StreamOf>& all, const StreamOf& one) {
  return std::find(all.begin(), all.end(), one) != all.end();
}

bool has(const Plan& plan, const Device& device, void* stream) {
  return plan.device == device &&
         std::find(plan.streams.begin(), plan.streams.end(), stream) != plan.streams.end();
}

// Keeps streams in queried_streams() while this object lives.
class QueriedStreams {
 public:
  QueriedStreams() = default;
  ~QueriedStreams() {
    const std::lock_guard lock(plans_mutex);
    for (const StreamOf& one : mine_) {
      const auto at = std::find(queried_streams().begin(), queried_streams().end(), one);
      if (at != queried_streams().end()) queried_streams().erase(at);  // a fork clears the list
    }
  }
  QueriedStreams(const QueriedStreams&) = delete;
  QueriedStreams& operator=(const QueriedStreams&) = delete;

  // Adds the streams of a plan. The caller holds the lock.
  void add(const Plan& plan) {
    for (void* stream : plan.streams) {
      const StreamOf one{plan.device, stream};
      if (is_among(mine_, one)) continue;
      mine_.reserve(mine_.size() + 1);
      queried_streams().push_back(one);
      mine_.push_back(one);
    }
  }
  const std::vector<StreamOf>& streams() const { return mine_; }

 private:
  std::vector<StreamOf> mine_;
};

// A forked child drops the entries of the parent's threads.
void after_fork_in_child() { queried_streams().clear(); }
const core::ForkedChild plans_forked_child(core::LockLevel::kPlans, &after_fork_in_child);

// Changes when note_launch() may have to record a launch again: a plan was captured, or a stream
// was destroyed. Written under the lock.
std::atomic<uint64_t> g_launch_generation{1};

// True if the stream is being captured. The query fails only for a device that is removed or lost,
// whose streams capture nothing.
bool is_captured(const Device& device, void* stream) {
  const Result<bool> capturing = devices::is_capturing(device, stream);
  return capturing.ok() && *capturing;
}

uint64_t pack_pair(uint32_t low, uint32_t high) noexcept { return low | uint64_t{high} << 32; }

const char* first_byte_of(const te_fl_tensor* t) noexcept {
  if (t == nullptr || t->dl.data == nullptr) return nullptr;
  return static_cast<const char*>(t->dl.data) + t->dl.byte_offset;
}

// Zeroes an argument's member that lies beyond the caller's struct_size, since such a member counts
// as absent.
void clear_cut_off(const te_fl_arg_desc& arg, const void* args, std::vector<std::byte>& padded) {
  const auto clear = [&](uint32_t offset, size_t bytes) {
    if (member(offset, bytes, args) != nullptr) return;
    std::fill_n(padded.begin() + offset, bytes, std::byte{0});
  };
  const bool list = arg.type == TE_FL_ARG_TENSOR_LIST || arg.type == TE_FL_ARG_I64_LIST;
  const bool pointer = list || arg.type == TE_FL_ARG_TENSOR || arg.type == TE_FL_ARG_SAVED ||
                       arg.type == TE_FL_ARG_COMMUNICATOR;
  clear(arg.offset, pointer ? sizeof(void*) : scalar_bytes(arg));
  if (list) clear(arg.count_offset, sizeof(int64_t));
}

// A sink for plan keys. A key contains only the presence and the alignment of an address.
struct KeySink {
  std::vector<uint64_t>& words;
  bool structure(uint64_t word) {
    words.push_back(word);
    return true;
  }
  void same(uint64_t word) { words.push_back(word); }
  void number(uint64_t word) { words.push_back(word); }
  void address(uint64_t word) { words.push_back(alignment_of(word)); }
};

}  // namespace

// For each element of an output list: the 1-based index of the first other list whose element at
// the same position has the same memory; 0 if there is none.
void PlanKey::add_list_sharing(const te_fl_op_schema& schema, const void* args, uint32_t out) {
  const TensorList mine = list_argument(*schema.args[out], args);
  for (int64_t k = 0; k < mine.count; ++k) {
    const char* memory = first_byte_of(mine.data[k]);
    uint64_t shared = 0;
    for (uint32_t j = 0; memory != nullptr && shared == 0 && j < schema.arg_count; ++j) {
      if (j == out || schema.args[j]->type != TE_FL_ARG_TENSOR_LIST) continue;
      const TensorList other = list_argument(*schema.args[j], args);
      if (k < other.count && first_byte_of(other.data[k]) == memory) shared = j + 1;
    }
    add(shared);
  }
}

// For each output: the 1-based index of the first other argument with the same memory; 0 if there
// is none.
void PlanKey::add_sharing(const te_fl_op_schema& schema, const void* args) {
  constexpr uint32_t kKept = 32;
  std::array<const char*, kKept> kept;  // start addresses of the first tensor arguments
  const auto find = [&](uint32_t i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    return arg.type == TE_FL_ARG_TENSOR ? first_byte_of(tensor_argument(arg, args)) : nullptr;
  };
  const uint32_t count = schema.arg_count;
  for (uint32_t i = 0; i < std::min(count, kKept); ++i) kept[i] = find(i);
  const auto begin_of = [&](uint32_t i) { return i < kKept ? kept[i] : find(i); };
  for (uint32_t i = 0; i < count; ++i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    if (arg.role == TE_FL_IN) continue;
    if (arg.type == TE_FL_ARG_TENSOR_LIST) add_list_sharing(schema, args, i);
    if (arg.type != TE_FL_ARG_TENSOR) continue;
    const char* memory = begin_of(i);
    uint64_t shared = 0;
    for (uint32_t j = 0; memory != nullptr && shared == 0 && j < count; ++j) {
      if (j != i && begin_of(j) == memory) shared = j + 1;
    }
    add(shared);
  }
}

// Adds the device, with which every key begins.
void PlanKey::add_device(const te_fl_context& context) {
  add(pack_pair(static_cast<uint32_t>(context.device.type),
                static_cast<uint32_t>(context.device.index)));
  add(context.provider);
}

bool PlanKey::belongs_to(std::string_view key, const Device& device) {
  te_fl_context context{};
  context.device = device.to_c();
  context.provider = device.provider;
  PlanKey begin;
  begin.add_device(context);
  return key.starts_with(begin.text());
}

void PlanKey::set(const core::CompiledOp& op, const void* args, const te_fl_context& context) {
  const te_fl_op_schema& schema = op.schema();
  words_.clear();
  add_device(context);
  add(context_word(context));
  const uint32_t size = core::struct_size_of(args);
  const auto* all = static_cast<const std::byte*>(args);
  std::vector<std::byte> padded;  // a copy of a shorter struct, extended with zeros
  if (size < schema.args_size) {
    padded.resize(schema.args_size);
    std::copy(all, all + size, padded.begin());
    for (uint32_t i = 0; i < schema.arg_count; ++i) clear_cut_off(*schema.args[i], args, padded);
    all = padded.data();
  }
  KeySink sink{words_};
  core::walk_call(op.layout(), all, sink);
  add_sharing(schema, args);
}

namespace {

// Waits for the stream's work. Logs an error of earlier ops on the stream, since perhaps no other
// code waits on this stream. Does nothing for a removed device, which runs no more work.
void wait_for(const Device& device, void* stream) noexcept {
  try {
    // An event shows completion without consuming the errors of earlier ops, which their owner must
    // see (R12).
    Result<Event> event = Event::create(device);
    if (!is_captured(device, stream) && event.ok() && event->record(stream).ok()) {
      Result<bool> done = event->done();
      for (; done.ok() && !*done; done = event->done()) std::this_thread::yield();
      if (done.ok()) return;
    }
    const Status status = devices::synchronize(device, stream);
    if (status.ok() || status.code() == StatusCode::kNotFound) return;
    log::error("waiting for the work of a plan that is being destroyed: " + status.to_string());
  } catch (...) {  // no memory for the message
  }
}

// Returns false if a stream of the plan is being captured. Otherwise waits for the work on all of
// its streams.
bool is_work_done(const Plan& plan) noexcept try {
  QueriedStreams queried;
  {
    const std::lock_guard lock(plans_mutex);
    queried.add(plan);
  }
  const auto captured = [](const StreamOf& one) { return is_captured(one.first, one.second); };
  if (std::any_of(queried.streams().begin(), queried.streams().end(), captured)) return false;
  for (const auto& [device, stream] : queried.streams()) wait_for(device, stream);
  return true;
} catch (...) {  // no memory; the caller tries again
  return false;
}

}  // namespace

Plan::~Plan() {
  if (impl->plan_memory) {
    // Streams may be destroyed between two attempts.
    while (!is_work_done(*this)) std::this_thread::yield();
    const std::lock_guard lock(plans_mutex);
    live_plans().erase(this);
  }
  try {
    impl->desc.destroy_plan(impl->desc.self, plan);
  } catch (...) {  // R5 forbids exceptions; a destructor cannot return an error
    log::once(log::Level::kWarning, "destroy_plan " + impl->impl_id,
              "implementation '" + impl->impl_id + "' of op '" + impl->op +
                  "': destroy_plan() threw an exception (rule R5)");
  }
}

const Plan* PlanCache::find(std::string_view key, bool capturing) {
  std::lock_guard lock(plans_mutex);
  const auto at = plans_.find(key);
  if (at == plans_.end()) return nullptr;
  at->second->use();
  if (capturing && !at->second->captured) {
    at->second->captured = true;
    if (impl_.plan_memory) live_plans().insert(at->second.get());
    g_launch_generation.fetch_add(1, std::memory_order_release);
  }
  return at->second.get();
}

std::vector<std::unique_ptr<Plan>> PlanCache::take(const Device& device) {
  std::vector<std::unique_ptr<Plan>> taken;
  std::list<Retired> gone;  // their events are destroyed after the lock is released
  std::unique_lock lock(plans_mutex);
  const auto belongs_to = [&](const Plan& plan) { return PlanKey::belongs_to(plan.key, device); };
  const auto is_looked_at = [&](const Retired& r) { return r.busy && belongs_to(*r.plan); };
  while (std::any_of(retired_.begin(), retired_.end(), is_looked_at)) {
    lock.unlock();
    std::this_thread::yield();
    lock.lock();
  }
  for (auto at = plans_.begin(); at != plans_.end();) {
    auto next = std::next(at);
    if (belongs_to(*at->second)) {
      taken.push_back(std::move(at->second));  // the plan owns the entry's key
      plans_.erase(at);
    }
    at = next;
  }
  for (auto at = retired_.begin(); at != retired_.end();) {
    const auto next = std::next(at);
    if (belongs_to(*at->plan)) {
      taken.push_back(std::move(at->plan));
      gone.splice(gone.end(), retired_, at);
    }
    at = next;
  }
  if (!taken.empty()) g_plan_generation.fetch_add(1, std::memory_order_release);
  return taken;
}

void Plan::note_stream(void* stream) const {
  std::lock_guard lock(plans_mutex);
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
    live_plans().insert(this);
    streams.push_back(stream);
  }
  recent[streams.size() % recent.size()].store(stream, std::memory_order_relaxed);
}

void leave_stream(const Device& device, void* stream) {
  const StreamOf one{device, stream};
  {
    const std::lock_guard lock(plans_mutex);
    const auto& all = live_plans();
    const auto names_it = [&](const Plan* plan) { return has(*plan, device, stream); };
    if (std::none_of(all.begin(), all.end(), names_it) && !is_among(queried_streams(), one)) return;
  }
  wait_for(device, stream);
  for (;; std::this_thread::yield()) {
    const std::lock_guard lock(plans_mutex);
    if (is_among(queried_streams(), one)) continue;
    for (const Plan* plan : live_plans()) {
      if (!has(*plan, device, stream)) continue;
      std::erase(plan->streams, stream);
      for (auto& known : plan->recent) {
        if (known.load(std::memory_order_relaxed) == stream) known.store(&plan->recent);
      }
    }
    g_launch_generation.fetch_add(1, std::memory_order_release);
    std::erase_if(live_plans(),
                  [](const Plan* plan) { return plan->streams.empty() && !plan->captured; });
    return;
  }
}

// A graph is usually launched repeatedly on one stream, so the thread's last launch is recognised
// without the lock.
void note_launch(const Device& device, void* stream) {
  struct Last {
    uint64_t generation = 0;
    StreamOf stream;
  };
  constinit static thread_local Last last{};
  const uint64_t generation = g_launch_generation.load(std::memory_order_acquire);
  if (last.generation == generation && last.stream == StreamOf{device, stream}) return;
  const std::lock_guard lock(plans_mutex);
  for (const Plan* plan : live_plans()) {
    if (!plan->captured || plan->device != device || has(*plan, device, stream)) continue;
    plan->streams.push_back(stream);
  }
  last = {generation, {device, stream}};  // value read before the lock was taken
}

Status check_captures(const std::function<bool(const Plan&)>& picks) {
  struct Use {
    StreamOf stream;
    std::string who;
  };
  std::vector<Use> uses;
  QueriedStreams queried;
  {
    const std::lock_guard lock(plans_mutex);
    for (const Plan* plan : live_plans()) {
      if (!picks(*plan)) continue;
      const size_t known = queried.streams().size();
      queried.add(*plan);
      for (size_t i = known; i < queried.streams().size(); ++i) {
        uses.push_back({queried.streams()[i], "implementation '" + plan->impl->impl_id +
                                                  "' of op '" + plan->impl->op + "'"});
      }
    }
  }
  for (const Use& use : uses) {
    const auto& [device, stream] = use.stream;
    if (!is_captured(device, stream)) continue;
    return Status(StatusCode::kBusy,
                  "a stream of " + to_string(device) + " that worked with a plan of " + use.who +
                      " is being captured into a graph, so the work with what the plan owns cannot "
                      "be waited for (rule R26); nothing was changed: end the capture first");
  }
  return {};
}

PlanCache::Work PlanCache::list_work(Retired& retired) noexcept try {
  const Plan& plan = *retired.plan;
  const auto is_captured = [&] {
    return std::any_of(plan.streams.begin(), plan.streams.end(),
                       [&](void* stream) { return registry::is_captured(plan.device, stream); });
  };
  if (!retired.marked) {
    if (is_captured()) return Work::kRuns;  // the event would become part of the graph
    for (void* stream : plan.streams) {
      Result<Event> event = Event::create(plan.device);
      if (!event.ok() || !event->record(stream).ok()) return Work::kUnknown;
      retired.behind.push_back(std::move(event).value());
    }
    retired.marked = true;
  }
  bool done = true;
  for (const Event& event : retired.behind) {
    const Result<bool> is = event.done();
    // During a capture, ~Plan() would wait for its end, which may depend on this thread.
    if (!is.ok()) return is_captured() ? Work::kRuns : Work::kUnknown;
    done &= *is;
  }
  return done ? Work::kDone : Work::kRuns;
} catch (...) {  // no memory; the next reap() tries again
  return Work::kRuns;
}

void PlanCache::reap() {
  const uint64_t oldest = oldest_inside();
  std::vector<Retired*> idle;
  std::list<Retired> dead;  // destroyed after the lock, when its streams have left `queried`
  QueriedStreams queried;
  {
    std::lock_guard lock(plans_mutex);
    for (Retired& retired : retired_) {
      if (retired.epoch >= oldest) break;
      if (retired.busy) continue;
      queried.add(*retired.plan);
      idle.push_back(&retired);
      retired.busy = true;
    }
  }
  if (idle.empty()) return;
  for (Retired* retired : idle) retired->work = list_work(*retired);
  std::lock_guard lock(plans_mutex);
  for (auto at = retired_.begin(); at != retired_.end();) {
    const auto next = std::next(at);
    if (std::find(idle.begin(), idle.end(), &*at) != idle.end()) {
      at->busy = false;
      // If the work is not known to be done, the streams stay and ~Plan() waits for them.
      if (at->work == Work::kDone) at->plan->streams.clear();
      if (at->work != Work::kRuns) dead.splice(dead.end(), retired_, at);
    }
    at = next;
  }
}

const Plan* PlanCache::insert(std::string key, const Device& device, void* made) {
  auto plan = std::make_unique<Plan>(impl_, std::move(key), device, made);
  reap();
  std::unique_ptr<Plan> dead;  // destroyed after the lock is released
  std::lock_guard lock(plans_mutex);
  g_plan_tick.fetch_add(1, std::memory_order_relaxed);
  plan->use();
  const auto [at, added] = plans_.try_emplace(plan->key, nullptr);
  if (!added) {
    dead = std::move(plan);
    return at->second.get();
  }
  at->second = std::move(plan);
  const Plan* kept = at->second.get();
  if (plans_.size() > (impl_.plan_memory ? kMaxMemoryPlans : kMaxPlans)) drop_oldest();
  return kept;
}

void PlanCache::drop_oldest() {
  auto oldest = plans_.end();
  for (auto at = plans_.begin(); at != plans_.end(); ++at) {
    if (at->second->captured) continue;
    if (oldest == plans_.end() || at->second->last_used.load(std::memory_order_relaxed) <
                                      oldest->second->last_used.load(std::memory_order_relaxed)) {
      oldest = at;
    }
  }
  if (oldest == plans_.end()) return;
  std::unique_ptr<Plan> dropped = std::move(oldest->second);
  plans_.erase(oldest);
  g_plan_generation.fetch_add(1, std::memory_order_release);
  retired_.push_back(Retired{std::move(dropped), retire()});
}

size_t PlanCache::size() const {
  std::lock_guard lock(plans_mutex);
  return plans_.size() + retired_.size();
}

}  // namespace te_fl::registry
