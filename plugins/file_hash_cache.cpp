#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <sstream>

#include "plugins/byte_source.hpp"
#include "plugins/file_trust.hpp"
#include "plugins/sha256.hpp"

namespace te_fl::plugins {
namespace {

constexpr std::string_view kFirstLine = "te_fl plugin hashes 1";
constexpr std::uint64_t kMaxStorageBytes = 2 << 20;
// The kernel stamps files with the time of its last tick. A file whose stamp is as young as that
// may be written again under the same stamp, so its hash is not remembered.
constexpr std::int64_t kSettleNs = 50'000'000;

std::int64_t nanoseconds(const timespec& t) {
  return static_cast<std::int64_t>(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

bool settled(std::int64_t stamp_ns) {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return nanoseconds(now) - stamp_ns > kSettleNs;
}

bool write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t put = ::write(fd, text.data(), text.size());
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(put));
  }
  return true;
}

// Writes beside `name` and renames, so that a reader sees the old file or the new one.
}  // namespace

bool replace_file(const std::string& name, std::string_view text) {
  std::string temporary = name + ".XXXXXX";
  const int fd = ::mkostemp(temporary.data(), O_CLOEXEC);
  if (fd < 0) return false;
  const bool written = write_all(fd, text);
  const bool closed = ::close(fd) == 0;
  if (written && closed && ::rename(temporary.c_str(), name.c_str()) == 0) return true;
  ::unlink(temporary.c_str());
  return false;
}

FileHashCache::FileHashCache(std::string storage) : storage_(std::move(storage)) { load(); }

void FileHashCache::load() {
  if (storage_.empty() || privileges_elevated() || !file_trust_problem(storage_).empty()) return;
  const std::vector<std::uint8_t> raw = ByteSource(storage_).read_some(0, kMaxStorageBytes);
  std::istringstream lines(std::string(raw.begin(), raw.end()));
  std::string line;
  if (!std::getline(lines, line) || line != kFirstLine) return;
  while (std::getline(lines, line) && entries_.size() < kMaxEntries) {
    std::istringstream fields(line);
    Entry e;
    std::string path;
    fields >> e.hex >> e.stamp.device >> e.stamp.inode >> e.stamp.size >> e.stamp.mtime_ns >>
        e.stamp.ctime_ns;
    fields.ignore(1);
    // A line cut off by a full disk has no path or a short hash.
    if (std::getline(fields, path) && e.hex.size() == 64 && path.starts_with('/')) {
      entries_[path] = e;
    }
  }
}

bool FileHashCache::stamp_of(const std::string& path, Stamp& stamp, std::string& error) {
  struct stat st {};
  if (::stat(path.c_str(), &st) != 0) {
    error = std::strerror(errno);
    return false;
  }
  stamp = {st.st_dev, st.st_ino, static_cast<std::uint64_t>(st.st_size), nanoseconds(st.st_mtim),
           nanoseconds(st.st_ctim)};
  return true;
}

FileHash FileHashCache::hash(const std::string& path) { return lookup(path, true); }
FileHash FileHashCache::hash_afresh(const std::string& path) { return lookup(path, false); }

FileHash FileHashCache::lookup(const std::string& path, bool use_cache) {
  FileHash out;
  Stamp before;
  if (!stamp_of(path, before, out.error)) return out;
  std::error_code code;
  const std::string key = std::filesystem::absolute(path, code).string();
  if (use_cache && !code) {
    const std::lock_guard lock(mutex_);
    const auto it = entries_.find(key);
    if (it != entries_.end() && it->second.stamp == before) return {it->second.hex, {}, true};
  }
  out = sha256_of_file(path);
  Stamp after;
  std::string ignored;
  const bool steady = !out.hex.empty() && stamp_of(path, after, ignored) && before == after &&
                      settled(std::max(after.ctime_ns, after.mtime_ns));
  if (!steady || code || key.find('\n') != key.npos) return out;
  const std::lock_guard lock(mutex_);
  if (entries_.size() >= kMaxEntries && !entries_.count(key)) entries_.erase(entries_.begin());
  Entry& e = entries_[key];
  changed_ = changed_ || !(e.stamp == after) || e.hex != out.hex;
  e = {after, out.hex};
  return out;
}

bool FileHashCache::save() {
  const std::lock_guard lock(mutex_);
  if (storage_.empty() || !changed_) return true;
  if (privileges_elevated()) return false;
  const std::filesystem::path folder = std::filesystem::path(storage_).parent_path();
  std::error_code code;
  if (!std::filesystem::exists(folder, code)) {
    std::filesystem::create_directories(folder.parent_path(), code);
    if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return false;
  }
  std::ostringstream text;
  text << kFirstLine << '\n';
  for (const auto& [path, e] : entries_) {
    text << e.hex << ' ' << e.stamp.device << ' ' << e.stamp.inode << ' ' << e.stamp.size << ' '
         << e.stamp.mtime_ns << ' ' << e.stamp.ctime_ns << ' ' << path << '\n';
  }
  if (!replace_file(storage_, text.str())) return false;
  changed_ = false;
  return true;
}

std::string default_hash_cache_file() {
  if (privileges_elevated()) return {};
  const auto absolute = [](const char* value) { return value != nullptr && value[0] == '/'; };
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); absolute(cache)) {
    return std::string(cache) + "/te_fl/plugin_hashes";
  }
  const char* home = std::getenv("HOME");
  return absolute(home) ? std::string(home) + "/.cache/te_fl/plugin_hashes" : std::string();
}

}  // namespace te_fl::plugins
