// The number of threads that this process can usefully run at once.
#pragma once

#include <string>

namespace te_fl::cpu {

// Number of CPUs in the calling thread's affinity mask; at least 1.
int affinity_cpu_count();

// Number of CPUs that the cgroup CPU quota grants (v2 cpu.max, v1 cpu.cfs_quota_us), rounded up:
// the tightest quota of the process's group and its ancestors. 0 if there is no quota. Tests use
// the two paths to supply a fake tree.
int cgroup_cpu_limit(const std::string& cgroup_root = "/sys/fs/cgroup",
                     const std::string& self_cgroup = "/proc/self/cgroup");

// The smaller of the two numbers above: the pool's default number of threads.
int available_cpu_count();

}  // namespace te_fl::cpu
