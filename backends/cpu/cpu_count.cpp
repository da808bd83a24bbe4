#include "cpu_count.hpp"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <memory>
#include <sstream>
#include <thread>

namespace te_fl::cpu {
namespace {

int quota_to_cpus(double quota, double period) {
  if (quota <= 0 || period <= 0) return 0;
  const double cpus = quota / period;
  if (cpus >= 1 << 20) return 0;  // no machine is that large: treat as no quota
  return std::max(1, static_cast<int>(cpus) + (cpus > static_cast<int>(cpus) ? 1 : 0));
}

int read_v2(const std::string& folder) {
  std::ifstream file(folder + "/cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max") return 0;
  std::istringstream text(quota);
  double value = 0;
  return text >> value ? quota_to_cpus(value, period) : 0;
}

int read_v1(const std::string& folder) {
  double quota = 0;
  double period = 0;
  if (!(std::ifstream(folder + "/cpu.cfs_quota_us") >> quota)) return 0;
  if (!(std::ifstream(folder + "/cpu.cfs_period_us") >> period)) return 0;
  return quota_to_cpus(quota, period);
}

int tighter(int a, int b) {
  if (a == 0) return b;
  if (b == 0) return a;
  return std::min(a, b);
}

// Returns the smallest limit that `read` finds in root + path and its parent directories up to
// root. In a container, the host's path may not exist below root; then only the limit in root is
// used.
int tightest_on_path(const std::string& root, std::string path, int (*read)(const std::string&)) {
  int limit = read(root);
  while (path.size() > 1) {
    limit = tighter(limit, read(root + path));
    path.erase(path.rfind('/'));
  }
  return limit;
}

bool lists_cpu_controller(const std::string& controllers) {
  std::istringstream list(controllers);
  for (std::string name; std::getline(list, name, ',');) {
    if (name == "cpu") return true;
  }
  return false;
}

}  // namespace

int affinity_cpu_count() {
  for (int cpus = 1024; cpus <= 1 << 18; cpus *= 2) {
    const size_t bytes = CPU_ALLOC_SIZE(cpus);
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(cpus),
                                                               [](cpu_set_t* p) { CPU_FREE(p); });
    if (!set) break;
    CPU_ZERO_S(bytes, set.get());
    if (sched_getaffinity(0, bytes, set.get()) == 0) {
      return std::max(1, CPU_COUNT_S(bytes, set.get()));
    }
    if (errno != EINVAL) break;  // EINVAL: the kernel's mask is larger than this buffer
  }
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int cgroup_cpu_limit(const std::string& cgroup_root, const std::string& self_cgroup) {
  int limit = 0;
  std::ifstream file(self_cgroup);
  for (std::string line; std::getline(file, line);) {  // a line has the form "id:controllers:/path"
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      limit = tighter(limit, tightest_on_path(cgroup_root, path, read_v2));
    } else if (lists_cpu_controller(controllers)) {
      limit = tighter(limit, tightest_on_path(cgroup_root + "/" + controllers, path, read_v1));
      if (controllers != "cpu") {
        limit = tighter(limit, tightest_on_path(cgroup_root + "/cpu", path, read_v1));
      }
    }
  }
  return limit;
}

int available_cpu_count() { return std::max(1, tighter(affinity_cpu_count(), cgroup_cpu_limit())); }

}  // namespace te_fl::cpu
