#include "comm/process_mark.hpp"

#include <unistd.h>

#include <array>
#include <fstream>
#include <sstream>

namespace te_fl::comm {
namespace {

// Identifies the boot and the PID namespace. Within one, a PID identifies one process at a time.
std::string machine() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::array<char, 64> name_space{};
  const ssize_t size = ::readlink("/proc/self/ns/pid", name_space.data(), name_space.size() - 1);
  if (!(file >> boot) || size <= 0) return {};
  return boot + " " + name_space.data();
}

// The start time of a process in ticks since boot; empty if there is no such process or it is a
// zombie.
std::string process_start(int process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string stat;
  std::getline(file, stat, '\0');
  const size_t name_end = stat.rfind(')');  // a process name may contain any character
  if (name_end == std::string::npos) return {};
  std::istringstream fields(stat.substr(name_end + 1));
  constexpr int kStart = 19;  // number of fields between state and start time
  std::string state, field;
  fields >> state;
  if (state == "Z" || state == "X") return {};
  for (int i = 0; i < kStart; ++i) fields >> field;
  return fields ? field : std::string();
}

}  // namespace

std::string process_mark() {
  const std::string here = machine(), start = process_start(::getpid());
  if (here.empty() || start.empty()) return {};
  return here + " " + std::to_string(::getpid()) + " " + start;
}

int ended_process(const std::string& mark) {
  std::istringstream fields(mark);
  std::string boot, name_space, start;
  int process = 0;
  if (!(fields >> boot >> name_space >> process >> start) || process <= 0) return 0;
  const std::string here = machine();
  if (here.empty() || here != boot + " " + name_space) return 0;
  return process_start(process) == start ? 0 : process;
}

}  // namespace te_fl::comm
