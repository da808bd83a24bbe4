// The number of threads that this process can usefully run at once.
#pragma once

#include <string>

namespace te_fl::cpu {

// Number of CPUs in the calling thread's affinity mask; at least 1.
int affinity_cpu_count();

// Returns the number of CPUs that the cgroup CPU quota (v2 cpu.max, v1 cpu.cfs_quota_us) allows,
// rounded up: the smallest quota of the process's cgroup and its ancestors. Returns 0 if there is
// no quota. The paths are parameters so that tests can supply a fake cgroup tree.
int cgroup_cpu_limit(const std::string& cgroup_root = "/sys/fs/cgroup",
                     const std::string& self_cgroup = "/proc/self/cgroup");

// The smaller of the two numbers above: the pool's default number of threads.
int available_cpu_count();

}  // namespace te_fl::cpu
