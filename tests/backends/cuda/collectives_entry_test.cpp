// Tests those functions of the CUDA plugin's NCCL collectives that need no GPU: refusals,
// descriptions and errors about the library. NCCL is a stand-in
// (tests/backends/cuda/CMakeLists.txt); a process loads only one NCCL.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "entered_plugin.hpp"
#include "support/expect.hpp"
#include "te_fl/ops/collective.h"

namespace {

using namespace te_fl::cuda::entered;

class CudaCollectives : public ::testing::Test {
 protected:
  void SetUp() override {
    stands_in = std::getenv("TE_FL_TEST_NCCL");
    if (stands_in == nullptr)
      GTEST_SKIP() << "run by ctest as cuda_nccl_entry and cuda_nccl_missing";
    comm.device = {TE_FL_DEVICE_CUDA, 0};
    comm.rank = 0, comm.size = 4, comm.id = 1, comm.maker = "cuda";
    ctx.struct_size = sizeof ctx;
    ctx.device = comm.device;
    ctx.errors = &errors.sink;
  }
  bool missing() const { return std::string(stands_in) == "none"; }
  te_fl_status supports(const char* name, const void* args) {
    errors.text.clear();
    const te_fl_op_desc& op = plugin.op(name, "vendor.nccl");
    return op.supports(op.self, &ctx, args);
  }
  std::string words(const char* name, const void* args) {
    Text text;
    const te_fl_op_desc& op = plugin.op(name, "vendor.nccl");
    EXPECT_EQ(op.describe(op.self, &ctx, args, &text.sink), TE_FL_OK) << errors.text;
    return text.text;
  }
  size_t scratch(const char* name, const void* args) {
    size_t bytes = 0;
    const te_fl_op_desc& op = plugin.op(name, "vendor.nccl");
    EXPECT_EQ(op.workspace(op.self, &ctx, args, &bytes), TE_FL_OK) << errors.text;
    return bytes;
  }

  Plugin plugin;
  const char* stands_in = nullptr;
  te_fl_communicator comm;
  te_fl_context ctx{};
  Text errors;
};

TEST_F(CudaCollectives, SayWhichFunctionsTheyCall) {
  const Fake in({64}, kF32), out({64}, kF32), codes({64}, kE4M3);
  te_fl_all_reduce_args sum{.input = &in.tensor, .output = &out.tensor, .comm = &comm};
  te_fl_broadcast_args broadcast{.data = &codes.tensor, .comm = &comm};
  if (missing()) {
    EXPECT_HAS(words("all_reduce", &sum), "NCCL has no ncclGetErrorString: install NCCL 2.10.0");
    return;
  }
  EXPECT_EQ(words("all_reduce", &sum), "NCCL 2.27.3: ncclAllReduce");
  EXPECT_EQ(scratch("all_reduce", &sum), 0u);
  EXPECT_EQ(words("broadcast", &broadcast), "NCCL 2.27.3: ncclBroadcast");
  sum.reduction = TE_FL_REDUCTION_MAX;
  EXPECT_HAS(words("all_reduce", &sum), "integers that order as the values do, NaN last");
  EXPECT_EQ(scratch("all_reduce", &sum), 64u * 4);
  comm.size = 1;
  const te_fl_barrier_args barrier{.comm = &comm};
  EXPECT_EQ(words("all_reduce", &sum), "NCCL 2.27.3: a copy, since there is one rank");
  EXPECT_EQ(words("broadcast", &broadcast), "NCCL 2.27.3: nothing to do, since there is one rank");
  EXPECT_EQ(words("barrier", &barrier), "NCCL 2.27.3: ncclAllReduce of one byte");
}

// In-switch reduction (NVLS) over three or more ranks sums in an order that varies between runs, so
// it is refused if deterministic results are required.
TEST_F(CudaCollectives, RefuseToRepeatSumsOfSwitches) {
  const Fake in({64}, kF32), out({64}, kF32);
  te_fl_all_reduce_args args{.input = &in.tensor, .output = &out.tensor, .comm = &comm};
  EXPECT_EQ(supports("all_reduce", &args), TE_FL_OK) << errors.text;
  ctx.flags = TE_FL_CALL_DETERMINISTIC;
  EXPECT_EQ(supports("all_reduce", &args), TE_FL_UNSUPPORTED);
  EXPECT_HAS(errors.text, "set NCCL_NVLS_ENABLE=0 on every rank");
  args.reduction = TE_FL_REDUCTION_MAX;
  EXPECT_EQ(supports("all_reduce", &args), TE_FL_OK) << errors.text;
  args.reduction = TE_FL_REDUCTION_SUM;
  comm.size = 2;
  EXPECT_EQ(supports("all_reduce", &args), TE_FL_OK) << errors.text;
}

// The environment is read once: a later change on one rank has no effect, and ranks compare the
// values read first.
TEST_F(CudaCollectives, AnswerForTheEnvironmentAtTheBeginning) {
  const auto set = [](const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr || *value == '\0' ? std::string() : name + ("=" + std::string(value));
  };
  const std::string switches = set("NCCL_NVLS_ENABLE"), algorithm = set("NCCL_ALGO");
  const bool repeats = switches == "NCCL_NVLS_ENABLE=0" || !algorithm.empty();
  const std::string either = switches + algorithm;  // at most one of the two is set
  const Fake in({64}, kF32), part({16}, kF32);
  const te_fl_reduce_scatter_args args{.input = &in.tensor, .output = &part.tensor, .comm = &comm};
  ctx.flags = TE_FL_CALL_DETERMINISTIC;
  for (const char* later : {"0", "1"}) {
    EXPECT_EQ(TE_FL_STATUS_CODE(supports("reduce_scatter", &args)),
              repeats ? TE_FL_OK : TE_FL_UNSUPPORTED)
        << errors.text;
    setenv("NCCL_NVLS_ENABLE", later, 1);
  }
  setenv("NCCL_NVLS_ENABLE", switches.empty() ? "" : switches.substr(17).c_str(), 1);
  if (missing()) return;
  EXPECT_EQ(std::string(plugin.comm().api->version(plugin.comm().self)),
            "2.27.3" + (either.empty() ? "" : " (" + either + ")"));
}

TEST_F(CudaCollectives, RefuseWhatDoesNotFit) {
  const Fake in({4, 3}, kF32), out({4, 3}, kF32), odd({7}, kF32), odd_out({7}, kF32);
  const int64_t mine[] = {1, 1, 1, 1}, other[] = {2, 1, 1, 0};
  te_fl_all_to_all_args exchange{.input = &odd.tensor, .output = &odd_out.tensor, .comm = &comm};
  EXPECT_EQ(supports("all_to_all", &exchange), TE_FL_INVALID_ARGUMENT | TE_FL_CLEAN);
  EXPECT_HAS(errors.text, "7 elements");
  te_fl_all_to_all_v_args rows{.input = &in.tensor,
                               .output = &out.tensor,
                               .comm = &comm,
                               .input_rows = mine,
                               .input_rows_count = 4,
                               .output_rows = other,
                               .output_rows_count = 4};
  EXPECT_EQ(supports("all_to_all_v", &rows), TE_FL_INVALID_ARGUMENT | TE_FL_CLEAN);
  EXPECT_HAS(errors.text, "'output_rows' has 2 for rank 0, this one, and 'input_rows' has 1");
  te_fl_send_args itself{.input = &in.tensor, .comm = &comm, .peer = 0};
  EXPECT_EQ(supports("send", &itself), TE_FL_INVALID_ARGUMENT | TE_FL_CLEAN);
}

TEST_F(CudaCollectives, ProviderNamesTheMissingLibrary) {
  const te_fl_comm_desc& desc = plugin.comm();
  EXPECT_STREQ(desc.name, "nccl");
  EXPECT_EQ(desc.device_types, uint64_t{1} << TE_FL_DEVICE_CUDA);
  EXPECT_EQ(desc.flags, uint32_t{TE_FL_COMM_CAPTURABLE});
  size_t bytes = 0;
  if (missing()) {
    EXPECT_EQ(desc.api->version(desc.self), nullptr);
    EXPECT_EQ(desc.api->unique_id(desc.self, nullptr, 0, &bytes, &errors.sink),
              TE_FL_NOT_FOUND | TE_FL_CLEAN);
    EXPECT_HAS(errors.text, ": install NCCL 2.10.0 or newer");
    return;
  }
  EXPECT_STREQ(desc.api->version(desc.self), "2.27.3");
  ASSERT_EQ(desc.api->unique_id(desc.self, nullptr, 0, &bytes, &errors.sink), TE_FL_OK);
  EXPECT_EQ(bytes, 128u);
  te_fl_comm_config config;
  config.device = comm.device;
  void* made = nullptr;
  char id[128] = {};
  config.id = id, config.id_bytes = 64;
  EXPECT_EQ(desc.api->create(desc.self, &config, &made, &errors.sink),
            TE_FL_INVALID_ARGUMENT | TE_FL_CLEAN);
  EXPECT_HAS(errors.text, "has 64 bytes, must have 128");
}

// Neither the stand-in nor CUDA without a GPU can create a communicator.
TEST_F(CudaCollectives, ACommunicatorThatCannotBeMadeSaysWhy) {
  if (missing()) GTEST_SKIP() << "there is no library";
  const te_fl_comm_desc& desc = plugin.comm();
  te_fl_comm_config config;
  config.device = comm.device;
  char id[128] = {};
  config.id = id, config.id_bytes = sizeof id;
  void* made = nullptr;
  ASSERT_EQ(desc.api->create(desc.self, &config, &made, &errors.sink), TE_FL_OK) << errors.text;
  int32_t done = 0;
  te_fl_status status = TE_FL_OK;
  for (int i = 0; i < 1000 && status == TE_FL_OK && done == 0; ++i) {
    status = desc.api->ready(made, &done, &errors.sink);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_EQ(status, TE_FL_COMM_FAILED);
  EXPECT_HAS(errors.text, "ncclCommInitRank of NCCL 2.27.3: an error");
  EXPECT_HAS(errors.text, "NCCL_DEBUG=WARN");
  EXPECT_EQ(desc.api->async_error(made, nullptr), TE_FL_OK);
  desc.api->abort(made);
  desc.api->abort(made);
  EXPECT_EQ(desc.api->async_error(made, nullptr), TE_FL_COMM_FAILED);
  desc.api->destroy(made);
  EXPECT_EQ(desc.api->group_end(desc.self, &errors.sink), TE_FL_FAILED_PRECONDITION | TE_FL_CLEAN);
}

}  // namespace
