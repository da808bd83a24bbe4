#include "core/allocations.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "core/fork.hpp"
#include "core/text.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::core {
namespace {

constinit ForkMutex mutex(27);
const ForkMutex::Registration registration(mutex);

struct Record {
  size_t bytes = 0;
  const char* name = nullptr;
  DType dtype = DType::kU8;
  uint8_t rank = 0;
  bool known = false;
  std::array<int64_t, kMaxRank> shape{};

  std::string use() const {
    if (!known) return "memory";
    if (name != nullptr) return name;
    return std::string(te_fl::name(dtype)) + shape_text({shape.data(), rank});
  }
};

struct Hash {
  size_t operator()(const Device& d) const noexcept {
    return static_cast<size_t>(d.type) * 31 + static_cast<size_t>(d.index) +
           (static_cast<size_t>(d.provider) << 16);
  }
};
using Records = std::unordered_map<void*, Record>;

std::unordered_map<Device, Records, Hash>& all() {  // never freed: memory may be freed at exit
  static auto* const map = new std::unordered_map<Device, Records, Hash>;
  return *map;
}

constinit thread_local const AllocationUse* t_use = nullptr;

}  // namespace

AllocationUse::AllocationUse(const char* name, DType dtype, std::span<const int64_t> shape) noexcept
    : name_(name), dtype_(dtype), shape_(shape), outer_(t_use) {
  t_use = this;
}
AllocationUse::~AllocationUse() { t_use = outer_; }

void note_allocation(const Device& device, void* data, size_t bytes) noexcept {
  Record record;
  record.bytes = bytes;
  if (const AllocationUse* use = t_use; use != nullptr) {
    record.known = true;
    record.name = use->name_;
    record.dtype = use->dtype_;
    record.rank = static_cast<uint8_t>(std::min<size_t>(use->shape_.size(), kMaxRank));
    std::copy_n(use->shape_.begin(), record.rank, record.shape.begin());
  }
  try {
    const std::lock_guard lock(mutex);
    all()[device][data] = record;
  } catch (...) {  // no host memory: the account is then short of this one
  }
}

void forget_allocation(const Device& device, void* data) noexcept {
  const std::lock_guard lock(mutex);
  const auto records = all().find(device);
  if (records != all().end()) records->second.erase(data);
}

std::string bytes_text(size_t bytes) {
  if (bytes < 1024) return std::to_string(bytes) + " bytes";
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes) / 1024;
  int unit = 0;
  for (; value >= 1024 && unit < 3; ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, value < 10 ? "%.1f %s" : "%.0f %s", value, kUnits[unit]);
  return text;
}

std::string largest_allocations(const Device& device, int count) {
  size_t number = 0, total = 0;
  std::map<std::string, std::pair<size_t, size_t>> uses;  // number, bytes of all
  {
    const std::lock_guard lock(mutex);
    const auto records = all().find(device);
    if (records == all().end() || records->second.empty()) return {};
    for (const auto& [data, record] : records->second) {
      ++number;
      total += record.bytes;
      auto& use = uses[bytes_text(record.bytes) + " for " + record.use()];
      ++use.first;
      use.second += record.bytes;
    }
  }
  std::vector<std::tuple<size_t, size_t, std::string>> sorted;
  for (const auto& [text, use] : uses) sorted.emplace_back(use.second, use.first, text);
  std::sort(sorted.rbegin(), sorted.rend());
  std::string out = "te-fl holds " + std::to_string(number) + " allocations of " +
                    bytes_text(total) + " on " + to_string(device) + ", the largest: ";
  for (size_t i = 0; i < sorted.size() && i < static_cast<size_t>(count); ++i) {
    const auto& [bytes, times, text] = sorted[i];
    out += (i == 0 ? "" : ", ") + (times > 1 ? std::to_string(times) + " x " : "") + text;
  }
  return out;
}

}  // namespace te_fl::core
