// Lists everything that determines which implementations run, as lines of text, and hashes the
// lines.

#include <algorithm>
#include <map>

#include "core/base/file.hpp"
#include "core/base/text.hpp"
#include "dispatch/watch/quarantine.hpp"
#include "policy/select.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/policy.hpp"
#include "te_fl/version.hpp"
#include "te_fl/watch.hpp"

namespace te_fl {
namespace {

using Lines = std::map<std::string, std::string>;

void add_devices(Lines& lines) {
  // Lists devices by type without the index, since the ranks of a job use different devices of one
  // type.
  for (const Device& device : devices::list()) {
    std::string type = to_string(device);
    if (const size_t colon = type.rfind(':'); colon != std::string::npos) type.resize(colon);
    const Result<te_fl_device_props> p = devices::properties(device);
    const std::string text =
        !p.ok() ? p.status().message()
                : std::string(p->name) + ", architecture " + std::to_string(p->arch) +
                      (p->driver[0] == '\0' ? "" : std::string(", driver ") + p->driver);
    std::string& all = lines["device " + type];
    if (all.find(text) == std::string::npos) all += (all.empty() ? "" : "; ") + text;
  }
}

void add_implementations(Lines& lines) {
  std::map<std::string, std::string> builds;
  for (const OpImplInfo& i : OpRegistry::instance().snapshot()) {
    auto at = builds.find(i.owner);
    if (at == builds.end()) at = builds.emplace(i.owner, dispatch::find_build_id(i.owner)).first;
    lines["op " + i.op + " " + i.impl_id] =
        "priority " + std::to_string(i.priority) +
        (i.desc.later_args == nullptr ? std::string()
                                      : ", later " + std::string(i.desc.later_args)) +
        ", flags " + std::to_string(i.desc.flags) + ", " + i.owner;
  }
  for (const auto& [owner, build] : builds) lines["build " + owner] = build;
}

void add_quarantines(Lines& lines) {
  const Result<std::vector<Quarantine>> list = quarantines();
  if (!list.ok()) {
    lines["quarantine"] = list.status().message();
    return;
  }
  for (const Quarantine& q : *list) {
    lines["quarantine " + q.op + " " + q.impl_id + " " + policy::dtype_mask_text(q.dtypes) + " " +
          policy::scaling_mask_text(q.scalings) + " " + q.build_id] =
        q.chip + (q.driver.empty() ? "" : ", driver " + q.driver);
  }
}

// Adds the values of active plugins' settings, where set, and te-fl's own settings that name files.
// A file is represented by a hash of its contents, since its path may differ between ranks.
void add_settings(Lines& lines) {
  constexpr uint64_t kMost = uint64_t{1} << 30;
  for (const environment::Variable& v : environment::table()) {
    const bool counts = v.plugin.empty() ? v.type == "file" : v.active;
    if (!counts || v.value == v.default_value) continue;
    std::string text = v.value;
    if (v.type == "file") {
      const Result<std::string> contents = core::read_file(v.value, kMost);
      text = contents.ok() ? core::contents_hash(*contents) : "unreadable";
    }
    lines["setting " + v.name] = text;
  }
}

Lines resolved() {
  OpManager::instance();  // loads the built-in backends and the plugins
  Lines lines;
  lines["te-fl"] = TE_FL_VERSION;
  lines["abi"] = std::to_string(TE_FL_ABI_MAJOR) + "." + std::to_string(TE_FL_ABI_MINOR);
  const Result<SelectionPolicy> policy = current_policy();
  lines["policy"] = policy.ok() ? policy->describe() : "invalid: " + policy.status().message();
  add_settings(lines);
  add_devices(lines);
  add_implementations(lines);
  add_quarantines(lines);
  return lines;
}

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

std::string to_text(const Lines& lines) {
  std::string out;
  for (const auto& [key, value] : lines) out += key + " = " + one_line(value) + "\n";
  return out;
}

// Parses lines of the form "key = value"; skips other lines.
Lines parsed(const std::string& table) {
  Lines lines;
  size_t at = 0;
  while (at < table.size()) {
    const size_t end = std::min(table.find('\n', at), table.size());
    const std::string line = table.substr(at, end - at);
    if (const size_t equals = line.find(" = "); equals != std::string::npos) {
      lines[line.substr(0, equals)] = line.substr(equals + 3);
    }
    at = end + 1;
  }
  return lines;
}

}  // namespace

std::string fingerprint() { return core::contents_hash(to_text(resolved())); }

std::string fingerprint_table() {
  const std::string table = to_text(resolved());
  return "fingerprint = " + core::contents_hash(table) + "\n" + table;
}

std::vector<std::string> fingerprint_difference(const std::string& a, const std::string& b) {
  const Lines left = parsed(a), right = parsed(b);
  std::vector<std::string> out;
  for (const auto& [key, value] : left) {
    const auto at = right.find(key);
    if (at == right.end()) {
      out.push_back("only in the first: " + key + " = " + value);
    } else if (at->second != value && key != "fingerprint") {
      out.push_back(key + ": " + value + " in the first, " + at->second + " in the second");
    }
  }
  for (const auto& [key, value] : right) {
    if (!left.contains(key)) out.push_back("only in the second: " + key + " = " + value);
  }
  return out;
}

}  // namespace te_fl
