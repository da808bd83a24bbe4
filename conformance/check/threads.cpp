#include "conformance/check/threads.hpp"

#include <sys/uio.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>
#include <vector>

namespace te_fl_tool::check {
namespace {

// The stack pointer of a thread, from /proc/self/task/ID/syscall. The file contains "NUMBER
// ARGUMENTS.. SP PC" for a waiting thread and "running" for a running one. Returns 0 if the thread
// has ended; nullopt if it is running or the system does not report it.
std::optional<uintptr_t> stack_pointer(const std::string& thread) {
  const std::string folder = "/proc/self/task/" + thread;
  for (int i = 0; i < 20; ++i) {
    std::ifstream file(folder + "/syscall");
    std::string line;
    std::getline(file, line);
    if (std::error_code error; !std::filesystem::exists(folder, error)) return 0;
    const size_t last = line.rfind(' ');
    const size_t before = last == std::string::npos ? last : line.rfind(' ', last - 1);
    if (before != std::string::npos)
      return std::stoull(line.substr(before + 1, last - before - 1), nullptr, 16);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return std::nullopt;
}

// The end of the memory mapping that contains the address; 0 if there is none.
uintptr_t mapping_end(uintptr_t address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    size_t dash = 0;
    const uintptr_t begin = std::stoull(line, &dash, 16);
    const uintptr_t end = std::stoull(line.substr(dash + 1), nullptr, 16);
    if (begin <= address && address < end) return end;
  }
  return 0;
}

}  // namespace

std::map<std::string, std::string> threads_now() {
  std::map<std::string, std::string> threads;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(entry.path() / "comm");
    std::getline(file, threads[entry.path().filename().string()]);
  }
  return threads;
}

bool runs_code(const std::string& thread, const std::function<bool(uintptr_t)>& of_interest) {
  const std::optional<uintptr_t> sp = stack_pointer(thread);
  if (!sp.has_value()) return true;
  const uintptr_t begin = *sp / sizeof(uintptr_t) * sizeof(uintptr_t), end = mapping_end(begin);
  if (begin == 0 || end == 0) return false;
  std::vector<uintptr_t> words((end - begin) / sizeof(uintptr_t));
  const iovec into{words.data(), words.size() * sizeof(uintptr_t)};
  const iovec from{reinterpret_cast<void*>(begin), into.iov_len};
  // Uses a system call instead of a pointer, since the thread may end and its stack be unmapped.
  const ssize_t got = process_vm_readv(getpid(), &into, 1, &from, 1, 0);
  if (got <= 0) return false;
  words.resize(static_cast<size_t>(got) / sizeof(uintptr_t));
  for (const uintptr_t word : words)
    if (of_interest(word)) return true;
  return false;
}

}  // namespace te_fl_tool::check
