#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "te_fl/comm.hpp"
#include "te_fl/status.hpp"

namespace te_fl::conformance {

// The processes of a job that run the same cases in the same order, each as one rank. After each
// case they exchange their results. Not thread-safe.
class Processes {
 public:
  // The processes of the job in the environment (te_fl::Job); null if this process is alone.
  static te_fl::Result<std::unique_ptr<Processes>> from_environment();

  int rank() const { return job_.rank; }
  int size() const { return job_.size; }
  const std::shared_ptr<Store>& store() const { return store_; }
  // The communicators made so far, by implementation and number of ranks. They are kept, since NCCL
  // takes a third of a second to make one and there are hundreds of cases.
  std::map<std::string, Comm>& communicators() { return communicators_; }
  // The number of exchanges so far. Between two cases it is equal on all ranks.
  uint64_t count() const { return count_; }
  // Sends `own` to all ranks and returns the texts of all ranks, by rank. TIMEOUT names the rank
  // that does not answer.
  te_fl::Result<std::vector<std::string>> exchange(const std::string& own);

 private:
  Processes(Job job, std::shared_ptr<Store> store)
      : job_(std::move(job)), store_(std::move(store)) {}
  Job job_;
  std::shared_ptr<Store> store_;
  std::map<std::string, Comm> communicators_;
  uint64_t count_ = 0;
};

}  // namespace te_fl::conformance
