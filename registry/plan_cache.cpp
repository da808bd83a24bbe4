#include "registry/plan_cache.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <mutex>

#include "core/base/fork.hpp"
#include "registry/arguments.hpp"
#include "registry/epoch.hpp"
#include "registry/implementation.hpp"
#include "te_fl/log.hpp"

namespace te_fl::registry {

std::atomic<uint64_t> g_plan_generation{1};

namespace {

// Guards every PlanCache. Plugins are never entered while it is held.
constinit core::ForkMutex mutex(core::LockLevel::kPlans);
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
  // Sizes of structs are below 2^16: a caller of later headers may have members that only its
  // implementation knows.
  add(1 | (dl.strides != nullptr ? 2 : 0) | (quant != nullptr ? 4 : 0) |
      alignment_of(first_byte(t)) << 8 | uint64_t{dl.dtype.code} << 16 |
      uint64_t{dl.dtype.bits} << 24 | uint64_t{dl.dtype.lanes} << 32 |
      uint64_t{t->struct_size} << 48);
  add(pair_of(t->provider, static_cast<uint32_t>(dl.ndim)));
  add(pair_of(static_cast<uint32_t>(dl.device.type), static_cast<uint32_t>(dl.device.index)));
  for (int i = 0; i < dl.ndim; ++i) add(static_cast<uint64_t>(dl.shape[i]));
  for (int i = 0; dl.strides != nullptr && i < dl.ndim; ++i) {
    add(static_cast<uint64_t>(dl.strides[i]));
  }
  if (quant == nullptr) return;
  add(alignment_of(quant->columnwise_data) | alignment_of(quant->scale_inv) << 4 |
      alignment_of(quant->columnwise_scale_inv) << 8 | alignment_of(quant->amax) << 12 |
      alignment_of(quant->scale) << 16 | uint64_t{quant->scaling & 0xffff} << 32 |
      uint64_t{quant->struct_size} << 48);
  add(pair_of(quant->flags, std::bit_cast<uint32_t>(quant->amax_epsilon)));
}

// What prepare() may read of a record: of one that the op is to fill in, the storage alone; what
// else stands there is left over from an earlier call.
void PlanKey::add_record(const te_fl_arg_desc& arg, const te_fl_saved* record) {
  if (record == nullptr) return add(0);
  const bool read = arg.role == TE_FL_IN;
  const char* producer = read ? record->producer : nullptr;
  add(1 | (read && record->opaque != 0 ? 2 : 0) | (producer != nullptr ? 4 : 0) |
      uint64_t{record->struct_size} << 32);
  add_tensor(record->storage);
  if (producer != nullptr) add_text(producer);
}

void PlanKey::add_text(std::string_view text) {
  add(text.size());
  for (size_t at = 0; at < text.size(); at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + at, std::min(sizeof word, text.size() - at));
    add(word);
  }
}

// For each element of an output list the first other list, from 1, that has its memory at the same
// place; 0 if there is none.
void PlanKey::add_list_sharing(const te_fl_op_schema& schema, const void* args, uint32_t out) {
  const TensorList mine = list_argument(*schema.args[out], args);
  for (int64_t k = 0; k < mine.count; ++k) {
    const char* memory = first_byte(mine.data[k]);
    uint64_t shared = 0;
    for (uint32_t j = 0; memory != nullptr && shared == 0 && j < schema.arg_count; ++j) {
      if (j == out || schema.args[j]->type != TE_FL_ARG_TENSOR_LIST) continue;
      const TensorList other = list_argument(*schema.args[j], args);
      if (k < other.count && first_byte(other.data[k]) == memory) shared = j + 1;
    }
    add(shared);
  }
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

// The first words of every key.
void PlanKey::add_device(const te_fl_context& context) {
  add(pair_of(static_cast<uint32_t>(context.device.type),
              static_cast<uint32_t>(context.device.index)));
  add(context.provider);
}

bool PlanKey::is_of(std::string_view key, const Device& device) {
  te_fl_context context{};
  context.device = device.to_c();
  context.provider = device.provider;
  PlanKey begin;
  begin.add_device(context);
  return key.starts_with(begin.text());
}

void PlanKey::set(const te_fl_op_schema& schema, const void* args, const te_fl_context& context) {
  count_ = sum_ = 0;
  many_.clear();
  add_device(context);
  // A call that is captured gets the plan that was made before capture, when all is allowed; and
  // what is looked at besides changes no plan.
  add(pair_of(context.flags & ~uint32_t{TE_FL_CALL_CAPTURING | TE_FL_CALL_VALIDATE},
              context.rng.state != nullptr));
  uint32_t size;
  std::memcpy(&size, args, sizeof size);
  add(size);
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    if (arg.type == TE_FL_ARG_TENSOR) {
      add_tensor(tensor_argument(arg, args));
    } else if (arg.type == TE_FL_ARG_TENSOR_LIST) {
      const TensorList list = list_argument(arg, args);
      add(static_cast<uint64_t>(list.count));
      for (int64_t k = 0; k < list.count; ++k) add_tensor(list.data[k]);
    } else if (arg.type == TE_FL_ARG_I64_LIST) {
      const IntegerList list = integers_argument(arg, args);
      add(static_cast<uint64_t>(list.count));
      for (int64_t k = 0; k < list.count; ++k) add(static_cast<uint64_t>(list.data[k]));
    } else if (arg.type == TE_FL_ARG_SAVED) {
      add_record(arg, member_or<const te_fl_saved*>(arg.offset, args, nullptr));
    } else {
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

const Plan* PlanCache::find(std::string_view key, bool capturing) {
  std::lock_guard lock(mutex);
  const auto at = plans_.find(key);
  if (at == plans_.end()) return nullptr;
  at->second->last_used.store(g_tick, std::memory_order_relaxed);
  at->second->captured |= capturing;
  return at->second.get();
}

std::vector<std::unique_ptr<Plan>> PlanCache::take(const Device& device) {
  std::vector<std::unique_ptr<Plan>> taken;
  std::lock_guard lock(mutex);
  const auto is_of = [&](const Plan& plan) { return PlanKey::is_of(plan.key, device); };
  for (auto at = plans_.begin(); at != plans_.end();) {
    auto next = std::next(at);
    if (is_of(*at->second)) {
      taken.push_back(std::move(at->second));  // whose key the entry's is
      plans_.erase(at);
    }
    at = next;
  }
  std::deque<Retired> others;
  for (Retired& retired : retired_) {
    if (is_of(*retired.plan)) {
      taken.push_back(std::move(retired.plan));
    } else {
      others.push_back(std::move(retired));
    }
  }
  retired_ = std::move(others);
  if (!taken.empty()) g_plan_generation.fetch_add(1, std::memory_order_release);
  return taken;
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
