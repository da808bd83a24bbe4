// Communicators whose ranks are processes. Tests that the reason of an abort, and a setting of one
// rank, reach the other ranks.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <iostream>
#include <thread>
#include <vector>

#include "support/temp_folder.hpp"
#include "te_fl/comm.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/ops.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl {
namespace {

namespace processes {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

Result<Comm> made(int rank, int size, const std::string& folder) {
  TE_FL_RETURN_IF_ERROR(environment::set("TE_FL_PLUGIN_MODULES", TE_FL_GLOO_PLUGIN));
  CommOptions options;
  options.rank = rank;
  options.size = size;
  options.timeout = 20s;
  options.provider = "gloo";
  TE_FL_ASSIGN_OR_RETURN(options.store, Store::open("file:" + folder, rank, size, 20s));
  return Comm::create(options);
}

// Runs f in one process per rank. A rank whose status is not OK fails the test. The rank
// `terminated` must end by SIGTERM instead.
void on_ranks(int size, const std::function<Status(int, const std::string&)>& f,
              int terminated = -1) {
  const test::TempFolder folder;
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(::fork());
    if (ranks.back() != 0) continue;
    ::alarm(60);
    const Status status = f(rank, folder / "store");
    if (!status.ok()) std::cerr << "rank " << rank << ": " << status.to_string() << std::endl;
    ::_exit(status.ok() ? 0 : 1);
  }
  for (const pid_t rank : ranks) {
    int state = 0;
    ASSERT_EQ(::waitpid(rank, &state, 0), rank);
    EXPECT_EQ(state,
              terminated >= 0 && rank == ranks[static_cast<size_t>(terminated)] ? SIGTERM : 0);
  }
}

Tensor zeros(int64_t n) { return Tensor::zeros({n}, DType::kF32).value(); }

Status all_reduce(const Comm& comm, const Tensor& t) {
  te_fl_all_reduce_args args;
  args.input = args.output = t.c();
  args.comm = comm.c();
  return ops::all_reduce(args);
}

// Returns OK if `status` is kCommFailed and contains `words`.
Status failed_with(const Status& status, const std::string& words) {
  const bool right = status.code() == StatusCode::kCommFailed &&
                     status.to_string().find(words) != std::string::npos;
  return right ? Status() : internal_error("it lacks '" + words + "': " + status.to_string());
}

constexpr char kWhy[] = "aborted it: the loss is not finite";

// Rank 0 aborts the world communicator while rank 1 waits on it for rank 2, whose connection is
// intact. The abort also ends the communicator that ranks 1 and 2 share.
Status abort_of_rank_0(int rank, const std::string& folder) {
  TE_FL_ASSIGN_OR_RETURN(Comm world, made(rank, 3, folder));
  TE_FL_ASSIGN_OR_RETURN(Comm pair, world.split(rank == 0 ? 0 : 1, rank, "pair"));
  const Tensor t = zeros(4);
  TE_FL_RETURN_IF_ERROR(all_reduce(world, t));
  const Clock::time_point begun = Clock::now();
  if (rank == 0) {
    std::this_thread::sleep_for(100ms);
    world.abort("the loss is not finite");
    std::this_thread::sleep_for(5s);  // keeps the process alive
    return failed_with(world.status(), "the loss is not finite");
  }
  if (rank == 1) {
    te_fl_recv_args args;
    args.output = t.c();
    args.comm = world.c();
    args.peer = 2;
    TE_FL_RETURN_IF_ERROR(failed_with(ops::recv(args), kWhy));
    TE_FL_RETURN_IF_ERROR(failed_with(all_reduce(pair, t), kWhy));
  } else {
    TE_FL_RETURN_IF_ERROR(failed_with(all_reduce(pair, t), kWhy));
  }
  return Clock::now() - begun < 4s ? Status() : internal_error("it took too long");
}

Status validate_on(int asking, int rank, const std::string& folder) {
  if (rank == asking) TE_FL_RETURN_IF_ERROR(environment::set("TE_FL_VALIDATE", "1"));
  TE_FL_ASSIGN_OR_RETURN(const Comm world, made(rank, 2, folder));
  const Tensor t = zeros(4), other = zeros(4 + rank);
  TE_FL_RETURN_IF_ERROR(all_reduce(world, t));
  return failed_with(all_reduce(world, other), "TE_FL_VALIDATE");
}

// Rank 1 is terminated. The other ranks' errors name that rank and its process id, for each of
// their communicators, whatever error the transport returns.
Status terminated_rank_1(int rank, const std::string& folder) {
  TE_FL_ASSIGN_OR_RETURN(const Comm world, made(rank, 3, folder));
  TE_FL_ASSIGN_OR_RETURN(const Comm other, world.split(0, rank, "other"));
  const Tensor t = zeros(4);
  TE_FL_RETURN_IF_ERROR(all_reduce(world, t));
  if (rank == 1) ::raise(SIGTERM);
  const Status status = all_reduce(world, t);
  TE_FL_RETURN_IF_ERROR(failed_with(status, "rank 1 has ended (its process "));
  TE_FL_RETURN_IF_ERROR(failed_with(status, "rank 1 did not answer"));
  TE_FL_RETURN_IF_ERROR(failed_with(status, "had begun all_reduce number 2 of f32[4]"));
  const Status of_other = all_reduce(other, t);
  TE_FL_RETURN_IF_ERROR(failed_with(of_other, "was aborted with the process's others"));
  return failed_with(of_other, "rank 1 has ended (its process ");
}

TEST(GlooProcesses, ATerminatedRankIsNamed) { on_ranks(3, terminated_rank_1, 1); }

TEST(GlooProcesses, AnAbortsReasonReachesTheOthers) { on_ranks(3, abort_of_rank_0); }

TEST(GlooProcesses, ValidateOfOneRankIsForAll) {
  for (int asking = 0; asking < 2; ++asking) {
    on_ranks(
        2, [&](int rank, const std::string& folder) { return validate_on(asking, rank, folder); });
  }
}

}  // namespace processes
}  // namespace
}  // namespace te_fl
