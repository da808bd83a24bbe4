#include "comm/process_store.hpp"

#include "comm/store_text.hpp"

namespace te_fl::comm {

Status ProcessStore::set(std::string_view key, std::string_view value) {
  const std::lock_guard lock(mutex_);
  const auto [at, added] = values_.emplace(key, value);
  if (!added && at->second != value) return set_before(key, address());
  changed_.notify_all();
  return {};
}

Result<std::string> ProcessStore::get(std::string_view key, std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const bool there =
      changed_.wait_until(lock, deadline_after(timeout), [&] { return values_.contains(key); });
  if (!there) return key_timeout(key, address(), timeout);
  return values_.find(key)->second;
}

Status ProcessStore::forget(std::string_view prefix) {
  const std::lock_guard lock(mutex_);
  auto at = values_.lower_bound(prefix);
  while (at != values_.end() && at->first.starts_with(prefix)) at = values_.erase(at);
  return {};
}

Result<std::optional<std::string>> ProcessStore::look(std::string_view key) {
  const std::lock_guard lock(mutex_);
  const auto at = values_.find(key);
  if (at == values_.end()) return std::optional<std::string>();
  return std::optional<std::string>(at->second);
}

}  // namespace te_fl::comm
