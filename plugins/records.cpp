#include "plugins/records.hpp"

#include <algorithm>
#include <filesystem>
#include <mutex>
#include <utility>

#include "core/base/fork.hpp"

namespace te_fl::plugins {
namespace {

// While this mutex is held, no plugin is called and no object that it guards is destroyed.
constinit core::ForkMutex records_mutex(core::LockLevel::kPluginRecords);
const core::ForkMutex::Registration records_registration(records_mutex);

std::vector<Record>& all() {  // never freed: plugins are used until the last thread ends
  static auto* const list = new std::vector<Record>;
  return *list;
}

bool is_builtin(const Record& r) { return r.info.origin == "built-in"; }

// True if a newer record of the same plugin may replace this one.
bool replaceable(const Record& r) {
  switch (r.info.state) {
    case State::kActive:
    case State::kAbandoned:
      return false;
    case State::kRetired:
      return r.instance == nullptr && r.retired.expired();
    case State::kFailed:
    case State::kSkipped:
    case State::kDeactivated:
      break;
  }
  return true;
}

bool same_plugin(const PluginInfo& a, const PluginInfo& b) {
  if (a.path.empty()) return b.path.empty() && a.name == b.name && a.origin == b.origin;
  return a.path == b.path && (a.name == b.name || a.origin == b.origin);
}

std::string canonical(const std::string& path) {
  std::error_code error;
  const std::filesystem::path real = std::filesystem::canonical(path, error);
  return error ? path : real.string();
}

std::string references(int64_t objects) {
  return "still referenced by " + std::to_string(objects) +
         (objects == 1 ? " live object" : " live objects") +
         " of its devices (memory, streams, events)";
}

}  // namespace

namespace records {

void put(Record record) {
  Record old;  // destroyed after the lock is released
  const std::lock_guard lock(records_mutex);
  for (Record& r : all()) {
    if (!replaceable(r) || !same_plugin(r.info, record.info)) continue;
    old = std::exchange(r, std::move(record));
    r.kept = std::move(old.kept);
    return;
  }
  const auto at =
      is_builtin(record) ? std::find_if_not(all().begin(), all().end(), is_builtin) : all().end();
  all().insert(at, std::move(record));
}

bool has_builtin(const std::string& name) {
  const std::lock_guard lock(records_mutex);
  return std::ranges::any_of(all(),
                             [&](const Record& r) { return is_builtin(r) && r.info.name == name; });
}

std::vector<PluginInfo> list() {
  std::vector<Record> now;  // copies own their instances; destroyed after the lock
  {
    const std::lock_guard lock(records_mutex);
    now = all();
  }
  std::vector<PluginInfo> out;
  for (Record& r : now) {
    if (r.info.state == State::kRetired && r.instance == nullptr) {
      if (const auto retired = r.retired.lock()) {
        r.info.reason = references(retired->live_objects());
      } else {
        r.info.state = State::kDeactivated;
        r.info.reason.clear();
      }
    }
    out.push_back(std::move(r.info));
  }
  return out;
}

Record active(const std::string& name) {
  const std::lock_guard lock(records_mutex);
  for (const Record& r : all()) {
    if (r.info.state == State::kActive && r.info.name == name) return r;
  }
  return {};
}

std::vector<std::string> failures_from(std::string_view origin) {
  const std::lock_guard lock(records_mutex);
  std::vector<std::string> out;
  for (const Record& r : all()) {
    if (r.info.origin != origin) continue;
    if (r.info.state != State::kFailed && r.info.state != State::kAbandoned) continue;
    out.push_back((r.info.path.empty() ? r.info.name : r.info.path) + ": " + r.info.reason);
  }
  return out;
}

std::string why_kept(const std::string& name) {
  const std::lock_guard lock(records_mutex);
  for (const Record& r : all()) {
    if (r.info.state == State::kRetired && r.info.name == name && r.instance != nullptr)
      return r.info.reason;
  }
  return {};
}

int64_t retired_objects(const std::string& name) {
  std::shared_ptr<Instance> retired;
  {
    const std::lock_guard lock(records_mutex);
    for (const Record& r : all()) {
      if (r.info.state != State::kRetired || r.info.name != name) continue;
      retired = r.retired.lock();
      if (retired != nullptr) break;
    }
  }
  return retired != nullptr ? retired->live_objects() : -1;
}

bool is_abandoned(const std::string& path) {
  const std::string file = canonical(path);
  const std::lock_guard lock(records_mutex);
  return std::any_of(all().begin(), all().end(), [&](const Record& r) {
    return r.info.state == State::kAbandoned && canonical(r.info.path) == file;
  });
}

void deactivated(const std::string& name, const std::string& reason,
                 std::shared_ptr<Library> kept) {
  std::shared_ptr<Instance> last;  // like `kept`, released after the lock: that calls the plugin
  const std::lock_guard lock(records_mutex);
  for (Record& r : all()) {
    if (r.info.state != State::kActive || r.info.name != name) continue;
    r.info.state = State::kRetired;
    r.info.reason = reason;
    r.info.ops.clear();
    r.info.comms.clear();
    std::swap(r.kept, kept);
    r.retired = r.instance;
    if (r.is_module) r.info.state = State::kDeactivated;
    if (reason.empty()) last = std::move(r.instance);
    return;
  }
}

}  // namespace records

}  // namespace te_fl::plugins
