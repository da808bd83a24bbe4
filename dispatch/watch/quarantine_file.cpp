#include "dispatch/watch/quarantine_file.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <tuple>

#include "core/base/file.hpp"
#include "te_fl/dtype.hpp"

namespace te_fl::dispatch {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxBytes = uint64_t{64} << 20;
constexpr const char* kVersionKey = "te_fl_quarantine";

auto make_key(const Quarantine& q) {
  return std::tie(q.op, q.impl_id, q.owner, q.build_id, q.chip, q.driver, q.dtypes, q.scalings);
}

template <class Name>
json list_names(uint64_t mask, int count, Name&& name) {
  json out = json::array();
  for (int i = 0; i < count; ++i) {
    if ((mask >> i & 1) != 0) out.push_back(name(i));
  }
  return out;
}

json to_json(const Quarantine& q) {
  return {
      {"op", q.op},
      {"impl", q.impl_id},
      {"owner", q.owner},
      {"build", q.build_id},
      {"chip", q.chip},
      {"driver", q.driver},
      {"dtypes", list_names(q.dtypes, TE_FL_DTYPE_COUNT,
                            [](int i) { return std::string(name(static_cast<DType>(i))); })},
      {"scalings", list_names(q.scalings, TE_FL_SCALING_COUNT,
                              [](int i) { return std::string(name(static_cast<Scaling>(i))); })},
      {"reason", q.reason},
      {"case", q.case_file},
      {"replay", q.replay}};
}

Result<Quarantine> from_json(const json& j) try {
  Quarantine q;
  q.op = j.at("op"), q.impl_id = j.at("impl"), q.owner = j.at("owner"), q.build_id = j.at("build");
  q.chip = j.at("chip"), q.driver = j.at("driver");
  q.reason = j.value("reason", ""), q.case_file = j.value("case", "");
  q.replay = j.value("replay", q.case_file.empty() ? "" : "te-fl replay " + q.case_file);
  for (const json& item : j.at("dtypes")) {
    TE_FL_ASSIGN_OR_RETURN(const DType dtype, parse_dtype(item.get<std::string>()));
    q.dtypes |= TE_FL_BIT(static_cast<uint32_t>(dtype));
  }
  for (const json& item : j.at("scalings")) {
    TE_FL_ASSIGN_OR_RETURN(const Scaling scaling, parse_scaling(item.get<std::string>()));
    q.scalings |= TE_FL_BIT(static_cast<uint32_t>(scaling));
  }
  return q;
} catch (const json::exception& e) {
  return invalid_argument(e.what());
}

// The text of a quarantine file. Replaces bytes of a reason that are not UTF-8.
std::string to_text(const json& value) {
  return value.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

// True if an entry is unchanged after writing and reading it. An entry with a changed name would
// exclude no implementation.
bool comes_back(const Quarantine& q) {
  const Result<Quarantine> again = from_json(json::parse(to_text(to_json(q))));
  return again.ok() && same(*again, q);
}

// The parsed file as a JSON object with a list of entries, or the reason for which it is invalid.
struct Parsed {
  json object = {{kVersionKey, 1}, {"entries", json::array()}};
  std::string problem;      // text behind "the quarantine file PATH "; empty: valid or absent
  bool replaceable = true;  // false: overwriting the file would lose data
};

Parsed parse(const std::string& path) {
  Parsed out;
  const Result<std::string> text = core::read_file(path, kMaxBytes);
  if (!text.ok()) {
    if (text.status().code() == StatusCode::kNotFound) return out;
    out.problem = text.status().message();
    out.replaceable = false;
    return out;
  }
  if (text->find_first_not_of(" \t\r\n") == std::string::npos) {
    out.problem = "is empty";
    return out;
  }
  const json object = json::parse(*text, nullptr, false);
  if (object.is_discarded()) {
    out.problem = "is not JSON; it may be half-written";
  } else if (!object.is_object() || !object.contains(kVersionKey) || object.at(kVersionKey) != 1) {
    out.problem = std::string("does not say \"") + kVersionKey + "\": 1";
  } else if (!object.contains("entries") || !object.at("entries").is_array()) {
    out.problem = "has no list \"entries\"";
  } else {
    out.object = object;
    return out;
  }
  out.replaceable = false;
  return out;
}

constexpr const char* kWayOut =
    "; correct it, move it away, or name another (TE_FL_QUARANTINE_FILE)";

Status cannot_write(const std::string& path, const std::string& why) {
  return failed_precondition("the quarantine file " + path + " cannot be written (" + why +
                             "): later runs will not know what this one found");
}

// A lock that one thread of one process holds at a time.
class FileLock {
 public:
  explicit FileLock(const std::string& path)
      : fd_(::open((path + ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
    int result = -1;
    while (fd_ >= 0 && (result = ::flock(fd_, LOCK_EX)) != 0 && errno == EINTR) {
    }
    if (result != 0) error_ = std::strerror(errno);
  }
  ~FileLock() {
    if (fd_ >= 0) ::close(fd_);
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  const std::string& error() const { return error_; }

 private:
  int fd_;
  std::string error_;  // empty: the lock is held
};

// Changes the file's entries by `change`, atomically with respect to other threads and processes.
Status change_file(const std::string& path, const std::function<void(json&)>& change) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code code;
  if (!folder.empty()) std::filesystem::create_directories(folder, code);
  const FileLock lock(path);
  if (!lock.error().empty()) return cannot_write(path, lock.error());
  Parsed file = parse(path);
  if (!file.replaceable) return cannot_write(path, "it " + file.problem + kWayOut);
  change(file.object.at("entries"));
  const Status written = core::replace_file(path, to_text(file.object));
  return written.ok() ? written : cannot_write(path, written.message());
}

}  // namespace

bool same(const Quarantine& a, const Quarantine& b) { return make_key(a) == make_key(b); }

bool contains(const std::vector<Quarantine>& list, const Quarantine& q) {
  return std::any_of(list.begin(), list.end(), [&](const auto& e) { return same(e, q); });
}

bool QuarantineIndex::Less::operator()(const Quarantine* a, const Quarantine* b) const {
  return make_key(*a) < make_key(*b);
}

std::string quarantines_text(const std::vector<Quarantine>& entries) {
  json all = json::array();
  for (const Quarantine& q : entries) all.push_back(to_json(q));
  return to_text(all);
}

Result<std::vector<Quarantine>> parse_quarantines(const std::string& text) {
  const json all = json::parse(text, nullptr, false);
  if (!all.is_array()) return invalid_argument("a text of quarantines is not a list in JSON");
  std::vector<Quarantine> out;
  for (const json& item : all) {
    TE_FL_ASSIGN_OR_RETURN(Quarantine q, from_json(item));
    out.push_back(std::move(q));
  }
  return out;
}

QuarantineFile read_quarantine_file(const std::string& path) {
  QuarantineFile out;
  const Parsed file = parse(path);
  const std::string who = "the quarantine file " + path + " ";
  if (!file.problem.empty()) {
    out.passed_over.push_back(who + file.problem + ", and is passed over" + kWayOut);
  }
  size_t number = 0;
  for (const json& item : file.object.at("entries")) {
    Result<Quarantine> q = from_json(item);
    if (q.ok()) {
      out.entries.push_back(std::move(q).value());
    } else {
      out.passed_over.push_back(who + "has an entry, number " + std::to_string(number) +
                                ", that this te-fl does not understand and passes over (" +
                                q.status().message() + "); it may be of a newer te-fl");
    }
    ++number;
  }
  return out;
}

Status add_to_quarantine_file(const std::string& path, const std::vector<Quarantine>& added) {
  std::string lost;
  TE_FL_RETURN_IF_ERROR(change_file(path, [&](json& entries) {
    std::vector<Quarantine> there;
    for (const json& item : entries) {
      if (Result<Quarantine> q = from_json(item); q.ok()) there.push_back(std::move(q).value());
    }
    QuarantineIndex known(there);
    for (const Quarantine& q : added) {
      if (known.contains(q)) continue;
      if (!comes_back(q)) {
        lost += (lost.empty() ? "'" : ", '") + q.impl_id + "' of op '" + q.op + "'";
        continue;
      }
      known.add(q);
      entries.push_back(to_json(q));
    }
  }));
  if (lost.empty()) return {};
  return failed_precondition("the quarantine file " + path + " cannot hold " + lost +
                             ": the name of its plugin, build, device or driver is not UTF-8; "
                             "later runs will not know. TE_FL_DENY_VENDORS or TE_FL_PER_OP leave "
                             "it out");
}

Status remove_from_quarantine_file(const std::string& path,
                                   const std::function<bool(const Quarantine&)>& meant) {
  return change_file(path, [&](json& entries) {
    json left = json::array();
    for (const json& item : entries) {
      const Result<Quarantine> q = from_json(item);
      if (!q.ok() || !meant(*q)) left.push_back(item);
    }
    entries = std::move(left);
  });
}

}  // namespace te_fl::dispatch
