#include "gemm/gemm_algorithm_file.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <istream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace te_fl::cuda {

using nlohmann::json;

namespace {

bool same_key(const GemmChoice& a, const GemmChoice& b) {
  return a.problem == b.problem && a.library == b.library && a.power_limit == b.power_limit &&
         a.device == b.device;
}

[[noreturn]] void fail(const std::string& path, const char* what) {
  throw std::runtime_error(path + " cannot be " + what + ": " + std::strerror(errno));
}

class OpenFile {
 public:
  OpenFile(const std::string& path, int flags)
      : descriptor_(open(path.c_str(), flags | O_CLOEXEC, 0644)) {}
  ~OpenFile() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  int get() const noexcept { return descriptor_; }

 private:
  int descriptor_;
};

void lock_whole(const OpenFile& file, const std::string& path) {
  if (file.get() < 0) fail(path, "opened");
  while (flock(file.get(), LOCK_EX) != 0) {
    if (errno != EINTR) fail(path, "locked");
  }
}

void write_all(const std::string& path, const std::string& text) {
  const OpenFile file(path, O_WRONLY | O_CREAT | O_TRUNC);
  if (file.get() < 0) fail(path, "written");
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = write(file.get(), text.data() + done, text.size() - done);
    if (count < 0 && errno != EINTR) fail(path, "written");
    if (count > 0) done += static_cast<size_t>(count);
  }
  if (fsync(file.get()) != 0) fail(path, "written");
}

// Replaces the file atomically: a concurrent reader, or a reader after a crash, finds either the
// complete old or the complete new file.
void replace_file(const std::string& path, const std::string& text) {
  const std::string made = path + "." + std::to_string(getpid()) + ".new";
  try {
    write_all(made, text);
    if (std::rename(made.c_str(), path.c_str()) != 0) fail(path, "written");
  } catch (...) {
    unlink(made.c_str());
    throw;
  }
  const size_t slash = path.rfind('/');
  const OpenFile folder(slash == std::string::npos ? "." : path.substr(0, slash + 1), O_RDONLY);
  if (folder.get() >= 0) (void)fsync(folder.get());  // some file systems do not support it
}

}  // namespace

std::vector<GemmChoice> parse_gemm_choices(std::istream& in) {
  const json root = json::parse(in);
  if (root.at("format") != 1) throw std::runtime_error("\"format\" is not 1");
  std::vector<GemmChoice> result;
  for (const json& entry : root.at("choices")) {
    GemmChoice c;
    c.device = entry.at("device");
    c.problem = entry.at("problem");
    c.library = entry.at("cublaslt");
    const auto words = entry.at("algorithm").get<std::vector<uint64_t>>();
    if (words.size() != c.algorithm.size()) {
      throw std::runtime_error("\"algorithm\" of " + c.problem + " has " +
                               std::to_string(words.size()) + " numbers; it must have " +
                               std::to_string(c.algorithm.size()));
    }
    std::copy(words.begin(), words.end(), c.algorithm.begin());
    c.power_limit = entry.value("power_limit_w", 0);
    c.config = entry.value("config", "");
    c.us = entry.value("us", 0.0);
    c.first_us = entry.value("heuristic_us", 0.0);
    c.candidates = entry.value("candidates", 0);
    c.different = entry.value("different", 0);
    result.push_back(std::move(c));
  }
  return result;
}

std::string gemm_choices_text(const std::vector<GemmChoice>& choices) {
  std::string text = R"({"format": 1, "choices": [)";
  for (const GemmChoice& c : choices) {
    json entry{{"device", c.device},
               {"problem", c.problem},
               {"cublaslt", c.library},
               {"config", c.config},
               {"us", c.us},
               {"heuristic_us", c.first_us},
               {"candidates", c.candidates},
               {"different", c.different},
               {"algorithm", c.algorithm}};
    if (c.power_limit != 0) entry["power_limit_w"] = c.power_limit;
    text += (&c == choices.data() ? "\n" : ",\n") + entry.dump();
  }
  return text + "\n]}\n";
}

const GemmChoice* find_choice(const std::vector<GemmChoice>& choices, const std::string& device,
                              size_t library, int power_limit, const std::string& problem) {
  const GemmChoice* other = nullptr;
  for (const GemmChoice& c : choices) {
    if (c.problem != problem || c.library != library || c.device != device) continue;
    if (c.power_limit == power_limit) return &c;
    if (other == nullptr && (c.power_limit == 0 || power_limit == 0)) other = &c;
  }
  return other;
}

std::vector<GemmChoice> merge_choices(std::vector<GemmChoice> choices,
                                      const std::vector<GemmChoice>& more) {
  for (const GemmChoice& c : more) {
    const auto same = [&](const GemmChoice& other) { return same_key(c, other); };
    if (std::none_of(choices.begin(), choices.end(), same)) choices.push_back(c);
  }
  return choices;
}

std::vector<GemmChoice> read_choices(const std::string& path, bool may_lack) {
  errno = 0;
  std::ifstream in(path);
  if (!in && errno == ENOENT && may_lack) return {};
  if (!in) fail(path, "read");
  try {
    return parse_gemm_choices(in);
  } catch (const std::exception& e) {
    throw std::runtime_error(path + " is not a file of choices: " + e.what());
  }
}

std::vector<GemmChoice> add_choices(const std::string& path, const std::vector<GemmChoice>& more) {
  const std::string lock_path = path + ".lock";
  const OpenFile lock(lock_path, O_RDWR | O_CREAT);
  lock_whole(lock, lock_path);
  std::vector<GemmChoice> there = read_choices(path, true);
  const size_t before = there.size();
  there = merge_choices(std::move(there), more);
  if (there.size() != before) replace_file(path, gemm_choices_text(there));
  return there;
}

}  // namespace te_fl::cuda
