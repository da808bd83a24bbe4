// Counts the threads that this process may usefully run at once.
#pragma once

#include <string>

namespace te_fl::cpu {

// CPUs that the calling thread's affinity mask allows; at least 1.
int affinity_cpu_count();

// CPUs granted by the cgroup CPU quota (v2 cpu.max, v1 cpu.cfs_quota_us), rounded up, the tightest
// of the process's group and its ancestors; 0 when there is no quota. The two paths exist so that
// tests can point at a made-up tree.
int cgroup_cpu_limit(const std::string& cgroup_root = "/sys/fs/cgroup",
                     const std::string& self_cgroup = "/proc/self/cgroup");

// The smaller of the two above; the pool's default thread count.
int available_cpu_count();

}  // namespace te_fl::cpu
