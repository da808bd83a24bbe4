#include "registry/plan_cache.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <mutex>

#include "core/fork.hpp"
#include "registry/arguments.hpp"
#include "registry/epoch.hpp"
#include "registry/implementation.hpp"
#include "te_fl/log.hpp"

namespace te_fl::registry {

std::atomic<uint64_t> g_plan_generation{1};

namespace {

// Guards every PlanCache. Plugins are never entered while it is held.
constinit core::ForkMutex mutex(60);
const core::ForkMutex::Registration registration(mutex);

uint64_t g_tick = 0;  // advances with every insertion; guarded by the mutex

// log2 of the alignment, at most 8.
uint64_t alignment_of(const void* data) noexcept {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return address == 0 ? 9 : static_cast<uint64_t>(std::min(__builtin_ctzll(address), 8));
}

uint64_t pair_of(uint32_t low, uint32_t high) noexcept { return low | uint64_t{high} << 32; }

const char* first_byte(const te_fl_tensor* t) noexcept {
  if (t == nullptr || t->dl.data == nullptr) return nullptr;
  return static_cast<const char*>(t->dl.data) + t->dl.byte_offset;
}

// 0 beyond a shorter struct, whose size is in the key.
uint64_t scalar(const te_fl_arg_desc& arg, const void* args) noexcept {
  return scalar_bytes(arg) == sizeof(uint64_t) ? member_or<uint64_t>(arg.offset, args, 0)
                                               : member_or<uint32_t>(arg.offset, args, 0);
}

}  // namespace

[[gnu::always_inline]] inline void PlanKey::add(uint64_t word) {
  if (count_ < few_.size()) [[likely]] {
    few_[count_] = word;
  } else {
    add_beyond(word);
  }
  // Each word by a factor of its own, so that no multiplication waits for the one before.
  sum_ += word * (2 * count_ + 1) * 0x9e3779b97f4a7c15u;
  ++count_;
}

void PlanKey::add_beyond(uint64_t word) {
  if (many_.empty()) many_.assign(few_.begin(), few_.end());
  many_.push_back(word);
}

void PlanKey::add_tensor(const te_fl_tensor* t) {
  if (t == nullptr) return add(0);
  const te_fl_dltensor& dl = t->dl;
  const te_fl_quant* quant = t->quant;
  add(1 | (dl.strides != nullptr ? 2 : 0) | (quant != nullptr ? 4 : 0) |
      alignment_of(first_byte(t)) << 8 | uint64_t{dl.dtype.code} << 16 |
      uint64_t{dl.dtype.bits} << 24 | uint64_t{dl.dtype.lanes} << 32);
  add(pair_of(t->provider, static_cast<uint32_t>(dl.ndim)));
  add(pair_of(static_cast<uint32_t>(dl.device.type), static_cast<uint32_t>(dl.device.index)));
  for (int i = 0; i < dl.ndim; ++i) add(static_cast<uint64_t>(dl.shape[i]));
  for (int i = 0; dl.strides != nullptr && i < dl.ndim; ++i) {
    add(static_cast<uint64_t>(dl.strides[i]));
  }
  if (quant == nullptr) return;
  add(alignment_of(quant->columnwise_data) | alignment_of(quant->scale_inv) << 4 |
      alignment_of(quant->columnwise_scale_inv) << 8 | alignment_of(quant->amax) << 12 |
      alignment_of(quant->scale) << 16 | uint64_t{quant->scaling} << 32);
  add(pair_of(quant->flags, std::bit_cast<uint32_t>(quant->amax_epsilon)));
}

// For each output the first other argument whose memory it has, from 1; 0 if there is none.
void PlanKey::add_sharing(const te_fl_op_schema& schema, const void* args) {
  constexpr uint32_t kKept = 32;
  std::array<const char*, kKept> kept;  // where the first tensor arguments begin
  const auto find = [&](uint32_t i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    return arg.type == TE_FL_ARG_TENSOR ? first_byte(tensor_argument(arg, args)) : nullptr;
  };
  const uint32_t count = schema.arg_count;
  for (uint32_t i = 0; i < std::min(count, kKept); ++i) kept[i] = find(i);
  const auto begin_of = [&](uint32_t i) { return i < kKept ? kept[i] : find(i); };
  for (uint32_t i = 0; i < count; ++i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    if (arg.type != TE_FL_ARG_TENSOR || arg.role == TE_FL_IN) continue;
    const char* memory = begin_of(i);
    uint64_t shared = 0;
    for (uint32_t j = 0; memory != nullptr && shared == 0 && j < count; ++j) {
      if (j != i && begin_of(j) == memory) shared = j + 1;
    }
    add(shared);
  }
}

void PlanKey::set(const te_fl_op_schema& schema, const void* args, const te_fl_context& context) {
  count_ = sum_ = 0;
  many_.clear();
  // A call that is captured gets the plan that was made before capture, when all is allowed; and
  // what is looked at besides changes no plan.
  add(pair_of(context.flags & ~uint32_t{TE_FL_CALL_CAPTURING | TE_FL_CALL_VALIDATE},
              context.provider));
  add(pair_of(static_cast<uint32_t>(context.device.type),
              static_cast<uint32_t>(context.device.index)));
  uint32_t size;
  std::memcpy(&size, args, sizeof size);
  add(std::min(size, schema.args_size));
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    if (arg.type == TE_FL_ARG_TENSOR) {
      add_tensor(tensor_argument(arg, args));
    } else if (arg.type == TE_FL_ARG_TENSOR_LIST) {
      const TensorList list = list_argument(arg, args);
      add(static_cast<uint64_t>(list.count));
      for (int64_t k = 0; k < list.count; ++k) add_tensor(list.data[k]);
    } else if (arg.type != TE_FL_ARG_SAVED) {
      add(scalar(arg, args));
    }
  }
  add_sharing(schema, args);
}

Plan::~Plan() {
  try {
    impl->desc.destroy_plan(impl->desc.self, plan);
  } catch (...) {  // R5 forbids it; a plan that is going has nobody to tell
    log::once(log::Level::kWarning, "destroy_plan " + impl->impl_id,
              "implementation '" + impl->impl_id + "' of op '" + impl->op +
                  "': destroy_plan() threw an exception (rule R5)");
  }
}

const Plan* PlanCache::find(std::string_view key) {
  std::lock_guard lock(mutex);
  const auto at = plans_.find(key);
  if (at == plans_.end()) return nullptr;
  at->second->last_used.store(g_tick, std::memory_order_relaxed);
  return at->second.get();
}

const Plan* PlanCache::insert(std::string key, void* made) {
  auto plan = std::make_unique<Plan>(impl_, std::move(key), made);
  const uint64_t oldest = oldest_inside();
  std::vector<std::unique_ptr<Plan>> dead;  // destroyed outside the lock
  std::lock_guard lock(mutex);
  while (!retired_.empty() && retired_.front().epoch < oldest) {
    dead.push_back(std::move(retired_.front().plan));
    retired_.pop_front();
  }
  plan->last_used.store(++g_tick, std::memory_order_relaxed);
  const auto [at, added] = plans_.try_emplace(plan->key, nullptr);
  if (!added) {
    dead.push_back(std::move(plan));
    return at->second.get();
  }
  at->second = std::move(plan);
  const Plan* kept = at->second.get();
  if (plans_.size() > kMaxPlans) drop_oldest();
  return kept;
}

void PlanCache::drop_oldest() {
  auto oldest = plans_.end();
  for (auto at = plans_.begin(); at != plans_.end(); ++at) {
    if (at->second->captured.load(std::memory_order_relaxed)) continue;
    if (oldest == plans_.end() || at->second->last_used.load(std::memory_order_relaxed) <
                                      oldest->second->last_used.load(std::memory_order_relaxed)) {
      oldest = at;
    }
  }
  if (oldest == plans_.end()) return;
  std::unique_ptr<Plan> dropped = std::move(oldest->second);
  plans_.erase(oldest);
  g_plan_generation.fetch_add(1, std::memory_order_release);
  retired_.push_back({std::move(dropped), retire()});
}

size_t PlanCache::size() const {
  std::lock_guard lock(mutex);
  return plans_.size() + retired_.size();
}

const Plan* PlanCacheFront::find(uint64_t impl, uint64_t hash, std::string_view key) noexcept {
  const uint64_t now = g_plan_generation.load(std::memory_order_acquire);
  if (now != generation_) {
    entries_.fill({});
    generation_ = now;
    return nullptr;
  }
  const Entry& entry = entries_[hash % kEntries];
  return entry.impl == impl && entry.hash == hash && entry.plan->key == key ? entry.plan : nullptr;
}

}  // namespace te_fl::registry
