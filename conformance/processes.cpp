#include "conformance/processes.hpp"

#include <chrono>
#include <utility>

namespace te_fl::conformance {
namespace {

// The time limit for other processes. A case takes less than the timeout of a communicator, which
// ranks.cpp sets.
constexpr std::chrono::milliseconds kPatience{60000};

}  // namespace

te_fl::Result<std::unique_ptr<Processes>> Processes::from_environment() {
  TE_FL_ASSIGN_OR_RETURN(Job job, Job::from_environment());
  if (job.size == 1) return std::unique_ptr<Processes>();
  TE_FL_ASSIGN_OR_RETURN(std::shared_ptr<Store> store,
                         Store::open(job.store_address, job.rank, job.size, kPatience));
  return std::unique_ptr<Processes>(new Processes(std::move(job), std::move(store)));
}

te_fl::Result<std::vector<std::string>> Processes::exchange(const std::string& own) {
  const std::string word = "conformance/" + std::to_string(count_++) + "/";
  TE_FL_RETURN_IF_ERROR(store_->set(word + std::to_string(job_.rank), own));
  std::vector<std::string> all;
  for (int r = 0; r < job_.size; ++r) {
    TE_FL_ASSIGN_OR_RETURN(std::string its, store_->get(word + std::to_string(r), kPatience));
    all.push_back(std::move(its));
  }
  return all;
}

}  // namespace te_fl::conformance
