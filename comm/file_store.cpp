#include "comm/file_store.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <set>
#include <thread>

#include "comm/random_bits.hpp"
#include "comm/store_text.hpp"
#include "core/base/file.hpp"
#include "core/base/text.hpp"

namespace te_fl::comm {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

constexpr const char* kMark = "te_fl_run";             // rank 0 has begun; the number of ranks
constexpr const char* kRoster = "te_fl_roster";        // the tokens of all ranks, one per line
constexpr const char* kRefusedMark = "te_fl_refused";  // a later rank 0 refused the used folder
constexpr std::string_view kTemporary = ".te_fl_new.";
constexpr size_t kMostName = 200;  // longest file name; file systems allow 255

std::string reason() { return std::strerror(errno); }

// Sleeps between two polls: 1 ms at first, up to 20 ms.
class Backoff {
 public:
  explicit Backoff(Deadline deadline) : deadline_(deadline) {}
  bool expired() const { return std::chrono::steady_clock::now() >= deadline_; }
  void wait() {
    std::this_thread::sleep_until(std::min(deadline_, std::chrono::steady_clock::now() + pause_));
    pause_ = std::min(pause_ * 3 / 2, std::chrono::microseconds(20000));
  }

 private:
  Deadline deadline_;
  std::chrono::microseconds pause_{1000};
};

// A token that is unique among all processes and threads.
std::string draw_token() {
  static std::atomic<uint32_t> count = 0;
  char text[64];
  std::snprintf(text, sizeof text, "%016llx.%x.%x", static_cast<unsigned long long>(random_bits()),
                static_cast<unsigned>(::getpid()), count.fetch_add(1));
  return text;
}

// The file name for a key: keeps letters, digits, '-' and '_', and encodes other bytes as %XX.
std::string file_name(std::string_view key) {
  std::string name;
  for (const char c : key) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       c == '-' || c == '_';
    char code[4];
    std::snprintf(code, sizeof code, "%%%02X", static_cast<unsigned>(static_cast<uint8_t>(c)));
    name += plain ? std::string(1, c) : code;
  }
  return name;
}

bool write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t wrote = ::write(fd, text.data(), text.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return false;
    text.remove_prefix(static_cast<size_t>(wrote));
  }
  return true;
}

class FileStore final : public Store {
 public:
  FileStore(std::string folder, const StoreRank& rank) : folder_(std::move(folder)), rank_(rank) {}

  // The first store that this process opens at the folder joins the run (see open_file_store()).
  // Stores that it opens later are part of the run already.
  Status join(Deadline deadline, milliseconds timeout) {
    if (rank_.generation > 1) return check_there();
    return rank_.rank == 0 ? begin(deadline, timeout) : follow(deadline, timeout);
  }

  Status set(std::string_view key, std::string_view value) override {
    TE_FL_RETURN_IF_ERROR(check_value_size(key, value.size()));
    TE_FL_ASSIGN_OR_RETURN(const std::string name, name_of(key));
    TE_FL_ASSIGN_OR_RETURN(const bool published, publish(name, value));
    if (published) return {};
    TE_FL_ASSIGN_OR_RETURN(const std::optional<std::string> there, read(name));
    return there == value ? Status() : set_before(key, address());
  }

  Result<std::string> get(std::string_view key, milliseconds timeout) override {
    TE_FL_ASSIGN_OR_RETURN(const std::string name, name_of(key));
    TE_FL_ASSIGN_OR_RETURN(std::optional<std::string> value,
                           wait_for(name, deadline_after(timeout)));
    if (!value) return key_timeout(key, address(), timeout);
    return std::move(*value);
  }

  Result<std::optional<std::string>> look(std::string_view key) override {
    TE_FL_ASSIGN_OR_RETURN(const std::string name, name_of(key));
    return read(name);
  }

  Status forget(std::string_view prefix) override {
    TE_FL_ASSIGN_OR_RETURN(const std::string first, name_of(prefix));
    TE_FL_ASSIGN_OR_RETURN(const std::set<std::string> names, entries());
    for (auto at = names.lower_bound(first); at != names.end() && at->starts_with(first); ++at)
      ::unlink(path(*at).c_str());
    return {};
  }

  std::string address() const override { return "file:" + folder_; }

 private:
  std::string path(std::string_view name) const { return folder_ + "/" + std::string(name); }

  Result<std::string> name_of(std::string_view key) const {
    std::string name = "key" + std::to_string(rank_.generation) + "." + file_name(key);
    if (!key.empty() && name.size() <= kMostName) return name;
    return invalid_argument("key '" + std::string(key) + "' of the store " + address() +
                            " becomes " + "a file's name of " + std::to_string(name.size()) +
                            " bytes; keys are not empty, and the name has at most " +
                            std::to_string(kMostName) + ": shorten the communicator's name");
  }

  Status cannot(const std::string& what) const {
    return failed_precondition("the store " + address() + ": " + what + ": " + reason());
  }

  Status earlier_run(const std::string& what) const {
    return Status(StatusCode::kAlreadyExists,
                  "the store " + address() + " " + what +
                      ", so an earlier run may have used it, whose values would be taken for this "
                      "one's; remove the folder or name another for each run (TE_FL_STORE)");
  }

  Status check_there() const {
    if (::access(folder_.c_str(), X_OK) == 0) return {};
    return failed_precondition("the store " + address() + " is gone: " + reason() +
                               "; the folder must stay until all ranks have ended");
  }

  // Creates a file with the value. False if the file exists.
  Result<bool> publish(const std::string& name, std::string_view value) const {
    // Allocates both paths before the file is created, since nothing would remove the file after an
    // exception.
    const std::string temporary = path(std::string(kTemporary) + draw_token()), place = path(name);
    const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) return cannot("a file cannot be made in it");
    const bool written = write_all(fd, value);
    const int error = errno;
    const bool closed = ::close(fd) == 0;
    const bool linked = written && closed && ::link(temporary.c_str(), place.c_str()) == 0;
    const int link_error = written ? errno : error;
    ::unlink(temporary.c_str());
    if (linked) return true;
    if (link_error == EEXIST) return false;
    errno = link_error;
    return cannot("file " + name +
                  " cannot be written (a file system without hard links cannot be "
                  "a store; tcp://HOST:PORT needs none)");
  }

  Result<std::optional<std::string>> read(const std::string& name) const {
    auto text = core::read_file(path(name), kMostValueBytes);
    if (text.ok()) return std::optional<std::string>(std::move(*text));
    if (text.status().code() == StatusCode::kNotFound) return std::optional<std::string>();
    return failed_precondition("the store " + address() + ": file " + name + " " +
                               text.status().message());
  }

  // Waits for a file and reads it; nullopt after the deadline.
  Result<std::optional<std::string>> wait_for(const std::string& name, Deadline deadline) const {
    for (Backoff backoff(deadline);; backoff.wait()) {
      auto value = read(name);
      if (!value.ok() || *value || backoff.expired()) return value;
      TE_FL_RETURN_IF_ERROR(check_there());
    }
  }

  Result<std::set<std::string>> entries() const {
    std::error_code error;
    std::set<std::string> names;
    for (fs::directory_iterator at(folder_, error), end; !error && at != end; at.increment(error))
      names.insert(at->path().filename().string());
    if (!error) return names;
    return failed_precondition("the store " + address() + " cannot be listed: " + error.message());
  }

  // ---- code for rank 0

  Status begin(Deadline deadline, milliseconds timeout) {
    std::error_code error;
    fs::create_directories(folder_, error);
    if (error) {
      return failed_precondition("the store " + address() + " cannot be made: " + error.message());
    }
    TE_FL_ASSIGN_OR_RETURN(const std::set<std::string> names, entries());
    if (!names.empty()) return refuse(names);
    TE_FL_ASSIGN_OR_RETURN(const bool first, publish(kMark, std::to_string(rank_.size)));
    if (!first) return earlier_run("was begun by another rank 0 at the same time");
    std::string roster;
    for (int r = 1; r < rank_.size; ++r) {
      TE_FL_ASSIGN_OR_RETURN(const std::optional<std::string> token,
                             wait_for("te_fl_rank." + std::to_string(r), deadline));
      if (!token) return missing(r, timeout);
      roster += *token + "\n";
    }
    return publish(kRoster, roster).status();
  }

  Status refuse(const std::set<std::string>& names) const {
    // Writes the mark only into a folder that was a store; any other folder is left unchanged.
    if (names.contains(kMark)) (void)publish(kRefusedMark, "");
    return earlier_run("is not empty (" + *names.begin() + (names.size() > 1 ? ", ...)" : ")"));
  }

  Status missing(int first, milliseconds timeout) const {
    std::vector<std::string> ranks;
    for (int r = first; r < rank_.size; ++r) {
      auto there = read("te_fl_rank." + std::to_string(r));
      if (!there.ok() || !*there) ranks.push_back(std::to_string(r));
    }
    return Status(StatusCode::kTimeout,
                  "the store " + address() + ": of " + std::to_string(rank_.size) +
                      " ranks, rank " + core::join(ranks) + " did not arrive within " +
                      std::to_string(timeout.count()) +
                      " ms; see that they were started and that they see this folder");
  }

  // ---- code for the other ranks

  Status follow(Deadline deadline, milliseconds timeout) {
    bool claimed = false;
    const std::string token = draw_token();
    for (Backoff backoff(deadline);; backoff.wait()) {
      TE_FL_ASSIGN_OR_RETURN(const bool done, claimed ? read_roster(token) : claim(token, claimed));
      if (done) return {};
      if (backoff.expired()) break;
    }
    const std::string what = claimed ? "not all ranks arrived" : "rank 0 did not start";
    return Status(StatusCode::kTimeout,
                  "the store " + address() + ": " + what + " in " +
                      std::to_string(timeout.count()) +
                      " ms; see that they were started and that they see this folder, and that it "
                      "is not one of an earlier run");
  }

  // Writes this rank's token if rank 0 has begun. False if the roster does not contain the token
  // yet.
  Result<bool> claim(const std::string& token, bool& claimed) const {
    auto mark = core::read_file(path(kMark), 64);
    if (mark.status().code() == StatusCode::kNotFound) return false;
    if (!mark.ok())
      return failed_precondition("the store " + address() + ": its mark " +
                                 mark.status().message());
    if (*mark != std::to_string(rank_.size)) {
      return earlier_run("is that of " + *mark + " ranks and not of " + std::to_string(rank_.size));
    }
    TE_FL_ASSIGN_OR_RETURN(claimed, publish("te_fl_rank." + std::to_string(rank_.rank), token));
    if (!claimed) return earlier_run("has had a rank " + std::to_string(rank_.rank) + " before");
    return false;
  }

  Result<bool> read_roster(const std::string& token) const {
    TE_FL_ASSIGN_OR_RETURN(const std::optional<std::string> refused, read(kRefusedMark));
    if (refused) return earlier_run("was refused by rank 0");
    TE_FL_ASSIGN_OR_RETURN(const std::optional<std::string> roster, read(kRoster));
    if (!roster) {
      TE_FL_RETURN_IF_ERROR(check_there());
      return false;
    }
    if (("\n" + *roster).find("\n" + token + "\n") == std::string::npos)
      return earlier_run("has a roster without this rank");
    return true;
  }

  std::string folder_;
  StoreRank rank_;
};

}  // namespace

Result<std::shared_ptr<Store>> open_file_store(const std::string& folder, const StoreRank& rank,
                                               milliseconds timeout) {
  auto store = std::make_shared<FileStore>(folder, rank);
  TE_FL_RETURN_IF_ERROR(store->join(deadline_after(timeout), timeout));
  return std::shared_ptr<Store>(std::move(store));
}

}  // namespace te_fl::comm
