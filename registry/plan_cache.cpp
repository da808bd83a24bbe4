#include "registry/plan_cache.hpp"

#include <algorithm>
#include <array>
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

// Writes a key piece by piece. Pieces are gathered here and appended together: a key has some
// hundred of them, and is written before every warm call.
class KeyWriter {
 public:
  explicit KeyWriter(std::string& out) : out_(out) {}
  ~KeyWriter() { out_.append(gathered_.data(), used_); }
  KeyWriter(const KeyWriter&) = delete;
  KeyWriter& operator=(const KeyWriter&) = delete;

  template <class T>
  void value(const T& value) {
    if (used_ + sizeof value > gathered_.size()) [[unlikely]]
      flush();
    std::memcpy(gathered_.data() + used_, &value, sizeof value);
    used_ += sizeof value;
  }
  void values(const int64_t* list, int count) {
    for (int i = 0; i < count; ++i) value(list[i]);
  }

 private:
  void flush() {
    out_.append(gathered_.data(), used_);
    used_ = 0;
  }

  std::string& out_;
  size_t used_ = 0;
  std::array<char, 512> gathered_;
};

// log2 of the alignment, at most 8.
uint8_t alignment_of(const void* data) noexcept {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return address == 0 ? 9 : static_cast<uint8_t>(std::min(__builtin_ctzll(address), 8));
}

void append_quant(KeyWriter& out, const te_fl_quant& q) {
  out.value(static_cast<uint8_t>(q.scaling));
  out.value(q.flags);
  out.value(q.amax_epsilon);
  for (const void* part :
       {static_cast<const void*>(q.columnwise_data), static_cast<const void*>(q.scale_inv),
        static_cast<const void*>(q.columnwise_scale_inv), static_cast<const void*>(q.amax),
        static_cast<const void*>(q.scale)}) {
    out.value(alignment_of(part));
  }
}

void append_tensor(KeyWriter& out, const te_fl_tensor* t) {
  if (t == nullptr) {
    out.value('\0');
    return;
  }
  const te_fl_dltensor& dl = t->dl;
  out.value(static_cast<char>(1 | (dl.strides != nullptr ? 2 : 0) | (t->quant != nullptr ? 4 : 0)));
  out.value(dl.dtype);
  out.value(dl.device);
  out.value(t->provider);
  out.value(static_cast<uint8_t>(dl.ndim));
  out.values(dl.shape, dl.ndim);
  if (dl.strides != nullptr) out.values(dl.strides, dl.ndim);
  out.value(alignment_of(dl.data == nullptr ? nullptr
                                            : static_cast<const char*>(dl.data) + dl.byte_offset));
  if (t->quant != nullptr) append_quant(out, *t->quant);
}

const char* first_byte(const te_fl_tensor* t) noexcept {
  if (t == nullptr || t->dl.data == nullptr) return nullptr;
  return static_cast<const char*>(t->dl.data) + t->dl.byte_offset;
}

void append_scalar(KeyWriter& out, const te_fl_arg_desc& arg, const void* args) {
  const size_t bytes = scalar_bytes(arg);
  // Beyond a shorter struct the argument has its neutral value, which one byte says.
  const void* value = member(arg.offset, bytes, args);
  out.value(static_cast<char>(value != nullptr ? 1 : 0));
  if (value == nullptr) return;
  if (bytes == sizeof(uint64_t)) {
    uint64_t bits;
    std::memcpy(&bits, value, sizeof bits);
    out.value(bits);
  } else {
    uint32_t bits;
    std::memcpy(&bits, value, sizeof bits);
    out.value(bits);
  }
}

// For each output the first other argument whose memory it has, from 1; 0 if there is none.
void append_sharing(const te_fl_op_schema& schema, const void* args, KeyWriter& out) {
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    if (arg.type != TE_FL_ARG_TENSOR || arg.role == TE_FL_IN) continue;
    const char* memory = first_byte(tensor_argument(arg, args));
    uint8_t shared = 0;
    for (uint32_t j = 0; memory != nullptr && shared == 0 && j < schema.arg_count; ++j) {
      const te_fl_arg_desc& other = *schema.args[j];
      if (j == i || other.type != TE_FL_ARG_TENSOR) continue;
      if (first_byte(tensor_argument(other, args)) == memory) shared = static_cast<uint8_t>(j + 1);
    }
    out.value(shared);
  }
}

}  // namespace

void append_plan_key(const te_fl_op_schema& schema, const void* args, const te_fl_context& context,
                     std::string& key) {
  KeyWriter out(key);
  // A call that is captured gets the plan that was made before capture, when all is allowed.
  out.value(context.flags & ~uint32_t{TE_FL_CALL_CAPTURING});
  out.value(context.device);
  out.value(context.provider);
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    if (arg.type == TE_FL_ARG_TENSOR) {
      append_tensor(out, tensor_argument(arg, args));
    } else if (arg.type == TE_FL_ARG_TENSOR_LIST) {
      const TensorList list = list_argument(arg, args);
      out.value(list.count);
      for (int64_t k = 0; k < list.count; ++k) append_tensor(out, list.data[k]);
    } else if (arg.type != TE_FL_ARG_SAVED) {
      append_scalar(out, arg, args);
    }
  }
  append_sharing(schema, args, out);
}

uint64_t hash_of_key(std::string_view key) noexcept {
  constexpr uint64_t kFactor = 0x9e3779b97f4a7c15u;
  uint64_t hash = key.size() * kFactor;
  const auto mix = [&](uint64_t word) {
    hash = (hash ^ word) * kFactor;
    hash ^= hash >> 32;
  };
  const char* at = key.data();
  size_t left = key.size();
  for (uint64_t word = 0; left >= sizeof word; at += sizeof word, left -= sizeof word) {
    std::memcpy(&word, at, sizeof word);
    mix(word);
  }
  uint64_t rest = 0;
  std::memcpy(&rest, at, left);
  mix(rest);
  return hash;
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
