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

// The processes of a job that run the same cases in the same order, each as one rank, and hear
// after every case what the others found. For one thread.
class Processes {
 public:
  // Those of the job in the environment (te_fl::Job); null: this process is alone.
  static te_fl::Result<std::unique_ptr<Processes>> from_environment();

  int rank() const { return job_.rank; }
  int size() const { return job_.size; }
  const std::shared_ptr<Store>& store() const { return store_; }
  // Those that this process has made with others, by implementation and number of ranks. NCCL takes
  // a third of a second to make one, and the cases are hundreds.
  std::map<std::string, Comm>& communicators() { return communicators_; }
  // Counts how often they have heard of each other; it is alike on all of them between two cases.
  uint64_t count() const { return count_; }
  // Tells `own` and returns what every rank says, by rank. TIMEOUT names the rank that is silent.
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
