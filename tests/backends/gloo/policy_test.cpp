// Ranks are processes, and one of them changes its policy after the communicator was created. The
// ranks keep the implementations that they agreed on, and no rank waits forever.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <iostream>
#include <vector>

#include "support/temp_folder.hpp"
#include "te_fl/comm.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/ops.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl {
namespace {

using namespace std::chrono_literals;

Status run_rank(int rank, const std::string& store) {
  TE_FL_RETURN_IF_ERROR(environment::set("TE_FL_PLUGIN_MODULES", TE_FL_GLOO_PLUGIN));
  CommOptions options;
  options.rank = rank;
  options.size = 2;
  options.timeout = 10000ms;
  options.provider = "gloo";
  TE_FL_ASSIGN_OR_RETURN(options.store, Store::open("file:" + store, rank, 2, 10000ms));
  TE_FL_ASSIGN_OR_RETURN(const Comm comm, Comm::create(options));
  const std::vector<float> one = {1};
  TE_FL_ASSIGN_OR_RETURN(const Tensor t, Tensor::from_values({1}, one));
  te_fl_all_reduce_args args;
  args.input = args.output = t.c();
  args.comm = comm.c();
  TE_FL_RETURN_IF_ERROR(ops::all_reduce(args));
  if (rank == 1) {
    TE_FL_RETURN_IF_ERROR(environment::set("TE_FL_PER_OP", "all_reduce=reference"));
    TE_FL_RETURN_IF_ERROR(OpManager::instance().reload());
  }
  TE_FL_RETURN_IF_ERROR(ops::all_reduce(args));
  TE_FL_ASSIGN_OR_RETURN(const Decision decision,
                         OpManager::instance().resolve(op::all_reduce, &args));
  const bool says = decision.policy.find("of communicator 'world'") != std::string::npos;
  if (decision.impl_id != "default.gloo" || says != (rank == 1))
    return Status(StatusCode::kInternal, decision.impl_id + " by " + decision.policy);
  const float sum = *static_cast<const float*>(t.c()->dl.data);
  return sum == 4 ? Status() : Status(StatusCode::kInternal, "the sum is " + std::to_string(sum));
}

TEST(GlooPolicy, OfOneRankThatCameLaterDecidesNothing) {
  const test::TempFolder folder;
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.push_back(::fork());
    if (ranks.back() != 0) continue;
    ::alarm(60);  // kills a rank that hangs
    const Status status = run_rank(rank, folder / "store");
    if (!status.ok()) std::cerr << "rank " << rank << ": " << status.to_string() << std::endl;
    ::_exit(status.ok() ? 0 : 1);
  }
  for (const pid_t rank : ranks) {
    int state = 0;
    ASSERT_EQ(::waitpid(rank, &state, 0), rank);
    EXPECT_EQ(state, 0);
  }
}

}  // namespace
}  // namespace te_fl
