#include "core/device/allocations.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <new>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/base/fork.hpp"
#include "core/base/text.hpp"
#include "core/device/allocator.hpp"
#include "core/device/device_use.hpp"
#include "te_fl/memory.hpp"

namespace te_fl::core {

struct AllocationRecord {
  size_t bytes = 0;
  const char* name = nullptr;
  DType dtype = DType::kU8;
  uint8_t rank = 0;
  bool known = false;
  std::array<int64_t, AllocationUse::kMaxRank> shape{};
  Giver giver{};

  // Records the purpose that the calling thread's innermost AllocationUse gives.
  explicit AllocationRecord(size_t bytes) noexcept;
  std::string use() const {
    if (!known) return "memory";
    if (name != nullptr) return name;
    return std::string(te_fl::name(dtype)) + shape_text({shape.data(), rank});
  }
};

namespace {

using Record = AllocationRecord;

constinit ForkMutex mutex(LockLevel::kAllocations);
const ForkMutex::Registration registration(mutex);

struct Hash {
  size_t operator()(const Device& d) const noexcept {
    return static_cast<size_t>(d.type) * 31 + static_cast<size_t>(d.index) +
           (static_cast<size_t>(d.provider) << 16);
  }
};
struct Account {
  std::map<void*, Record> records;  // key: address
  size_t bytes = 0, peak = 0, record_at = SIZE_MAX;
  std::vector<devices::MemoryHolder> recorded;

  // True if [data, data + size) overlaps a recorded block.
  bool overlaps(const void* data, size_t size) const {
    const auto begin = reinterpret_cast<uintptr_t>(data);
    const auto after = records.upper_bound(const_cast<void*>(data));
    if (after != records.end() && reinterpret_cast<uintptr_t>(after->first) - begin < size)
      return true;
    if (after == records.begin()) return false;
    const auto& [at, before] = *std::prev(after);
    const uintptr_t distance = begin - reinterpret_cast<uintptr_t>(at);
    return distance == 0 || distance < before.bytes;
  }
  void add(void* data, Record record) {
    remove(data);
    bytes += record.bytes;
    records.insert_or_assign(data, std::move(record));
    peak = std::max(peak, bytes);
    if (bytes < record_at) return;
    record_at = SIZE_MAX;
    recorded = holders();
  }
  Giver remove(void* data) {
    const auto record = records.find(data);
    if (record == records.end()) return {};
    bytes -= record->second.bytes;
    Giver giver = std::move(record->second.giver);
    records.erase(record);
    return giver;
  }
  // The purposes of the allocations and their sizes, the largest total first.
  std::vector<devices::MemoryHolder> holders() const {
    std::map<std::pair<size_t, std::string>, size_t> uses;  // {bytes of one allocation, purpose} ->
                                                            // number of allocations
    for (const auto& [data, record] : records) ++uses[{record.bytes, record.use()}];
    std::vector<devices::MemoryHolder> out;
    for (const auto& [use, count] : uses) out.push_back({use.second, count, use.first * count});
    std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) {
      return std::tie(b.bytes, b.count, b.use) < std::tie(a.bytes, a.count, a.use);
    });
    return out;
  }
};

std::unordered_map<Device, Account, Hash>& all() {  // never destroyed: memory may be freed at exit
  static auto* const map = new std::unordered_map<Device, Account, Hash>;
  return *map;
}

constinit thread_local const AllocationUse* t_use = nullptr;

}  // namespace

AllocationUse::AllocationUse(const char* name, DType dtype, std::span<const int64_t> shape) noexcept
    : name_(name), dtype_(dtype), shape_(shape), outer_(t_use) {
  t_use = this;
}
AllocationUse::~AllocationUse() { t_use = outer_; }

AllocationRecord::AllocationRecord(size_t size) noexcept : bytes(size) {
  const AllocationUse* use = t_use;
  if (use == nullptr) return;
  known = true;
  name = use->name_;
  dtype = use->dtype_;
  rank = static_cast<uint8_t>(std::min<size_t>(use->shape_.size(), AllocationUse::kMaxRank));
  std::copy_n(use->shape_.begin(), rank, shape.begin());
}

void note_allocation(const Device& device, void* data, size_t bytes) noexcept {
  try {
    const std::lock_guard lock(mutex);
    all()[device].add(data, Record(bytes));
  } catch (...) {  // no host memory: this allocation is missing from the account
  }
}

Status note_given(const Device& device, void* data, size_t bytes, Giver giver) {
  const std::string who = giver.allocator->text();
  try {
    const std::lock_guard lock(mutex);
    Account& account = all()[device];
    if (!account.overlaps(data, bytes)) {
      Record record(bytes);
      record.giver = std::move(giver);
      account.add(data, std::move(record));
      return {};
    }
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "no host memory to note an allocation by " + who);
  }
  return internal_error(who + " was called for " + bytes_text(bytes) +
                        " and returned memory that is in use already (rule R25); the program that "
                        "installed it has to correct it");
}

Giver forget_allocation(const Device& device, void* data) noexcept {
  const std::lock_guard lock(mutex);
  const auto account = all().find(device);
  return account != all().end() ? account->second.remove(data) : Giver{};
}

std::string largest_allocations(const Device& device, int count) {
  size_t number = 0, total = 0;
  std::vector<devices::MemoryHolder> holders;
  {
    const std::lock_guard lock(mutex);
    const auto account = all().find(device);
    if (account == all().end() || account->second.records.empty()) return {};
    number = account->second.records.size();
    total = account->second.bytes;
    holders = account->second.holders();
  }
  std::string out = "te-fl holds " + std::to_string(number) + " allocations of " +
                    bytes_text(total) + " on " + to_string(device) + ", the largest: ";
  for (size_t i = 0; i < holders.size() && i < static_cast<size_t>(count); ++i) {
    const devices::MemoryHolder& h = holders[i];
    out += (i == 0 ? "" : ", ") + (h.count > 1 ? std::to_string(h.count) + " x " : "") +
           bytes_text(h.bytes / h.count) + " for " + h.use;
  }
  return out;
}

}  // namespace te_fl::core

namespace te_fl::devices {
namespace {

Status check_counted(const Device& device) {
  TE_FL_RETURN_IF_ERROR(core::DeviceUse::of(device).status());
  if (!device.is_host()) return {};
  return Status(StatusCode::kUnsupported,
                "memory of " + to_string(device) +
                    " is not counted; name a device that a plugin provides, or the operating "
                    "system for the process's memory")
      .set_clean();
}

}  // namespace

Result<MemoryAccount> memory_account(const Device& device) {
  TE_FL_RETURN_IF_ERROR(check_counted(device));
  const std::lock_guard lock(core::mutex);
  const core::Account& account = core::all()[device];
  return MemoryAccount{account.bytes, account.peak, account.holders(), account.recorded};
}

Status watch_memory(const Device& device, size_t record_at) {
  TE_FL_RETURN_IF_ERROR(check_counted(device));
  const std::lock_guard lock(core::mutex);
  core::Account& account = core::all()[device];
  account.peak = account.bytes;
  account.record_at = record_at;
  account.recorded.clear();
  return {};
}

}  // namespace te_fl::devices
