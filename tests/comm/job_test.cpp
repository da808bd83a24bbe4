#include <gtest/gtest.h>
#include <stdlib.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "support/expect.hpp"
#include "te_fl/comm.hpp"
#include "te_fl/environment.hpp"

namespace te_fl {
namespace {

constexpr const char* kNames[] = {"TE_FL_STORE", "TE_FL_RANK",       "TE_FL_WORLD_SIZE",
                                  "RANK",        "TE_FL_LOCAL_RANK", "WORLD_SIZE",
                                  "LOCAL_RANK",  "MASTER_ADDR",      "MASTER_PORT"};

class JobTest : public ::testing::Test {
 protected:
  void TearDown() override { (void)job({}); }
  // Returns the job for an environment with these variables of kNames and no others.
  static Result<Job> job(const std::map<std::string, std::string>& variables) {
    for (const char* name : kNames) unsetenv(name);
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
    (void)environment::reload();
    return Job::from_environment();
  }
};

TEST_F(JobTest, OneRankWithoutVariables) {
  const auto alone = job({});
  ASSERT_OK(alone);
  EXPECT_EQ(alone->rank, 0);
  EXPECT_EQ(alone->size, 1);
  EXPECT_EQ(alone->store_address, "");
}

TEST_F(JobTest, OwnVariables) {
  const auto four = job({{"TE_FL_RANK", "3"},
                         {"TE_FL_WORLD_SIZE", "4"},
                         {"TE_FL_LOCAL_RANK", "1"},
                         {"TE_FL_STORE", "file:/shared/job7"},
                         {"RANK", "0"},
                         {"WORLD_SIZE", "2"}});
  ASSERT_OK(four);
  EXPECT_EQ(four->rank, 3);
  EXPECT_EQ(four->size, 4);
  EXPECT_EQ(four->local_rank, 1);
  EXPECT_EQ(four->store_address, "file:/shared/job7");
  const auto local = job({{"TE_FL_RANK", "1"}, {"TE_FL_WORLD_SIZE", "2"}, {"TE_FL_STORE", "x"}});
  ASSERT_OK(local);
  EXPECT_EQ(local->local_rank, 1);
}

TEST_F(JobTest, Torchruns) {
  std::map<std::string, std::string> variables = {{"RANK", "5"},
                                                  {"WORLD_SIZE", "8"},
                                                  {"LOCAL_RANK", "1"},
                                                  {"MASTER_ADDR", "node0"},
                                                  {"MASTER_PORT", "29500"}};
  const auto eight = job(variables);
  ASSERT_OK(eight);
  EXPECT_EQ(eight->rank, 5);
  EXPECT_EQ(eight->size, 8);
  EXPECT_EQ(eight->local_rank, 1);
  EXPECT_EQ(eight->store_address, "tcp://node0:29501");
  variables["MASTER_ADDR"] = "fd00::1";
  const auto sixth = job(variables);
  ASSERT_OK(sixth);
  EXPECT_EQ(sixth->store_address, "tcp://[fd00::1]:29501");
}

TEST_F(JobTest, WrongVariablesAreNamed) {
  using Variables = std::map<std::string, std::string>;
  const std::vector<std::pair<Variables, std::string>> wrong = {
      {{{"TE_FL_RANK", "one"}}, "TE_FL_RANK=one"},
      {{{"TE_FL_RANK", "-1"}}, "TE_FL_RANK=-1"},
      {{{"TE_FL_RANK", "0"}}, "TE_FL_WORLD_SIZE is unset"},
      {{{"TE_FL_WORLD_SIZE", "2"}}, "TE_FL_RANK is unset"},
      {{{"TE_FL_RANK", "2"}, {"TE_FL_WORLD_SIZE", "2"}}, "TE_FL_RANK=2 and TE_FL_WORLD_SIZE=2"},
      {{{"TE_FL_RANK", "0"}, {"TE_FL_WORLD_SIZE", "2"}}, "TE_FL_STORE is unset"},
      {{{"RANK", "0"}}, "WORLD_SIZE is unset"},
      {{{"WORLD_SIZE", "2"}}, "RANK is unset"},
      {{{"RANK", "1x"}, {"WORLD_SIZE", "2"}}, "RANK=1x"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "0"}}, "WORLD_SIZE=0"},
      {{{"RANK", "2"}, {"WORLD_SIZE", "2"}}, "RANK=2 and WORLD_SIZE=2"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "2"}}, "MASTER_PORT is unset"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "1"}}, "MASTER_ADDR is unset"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "65535"}}, "MASTER_PORT=65535"}};
  for (const auto& [variables, text] : wrong) EXPECT_FAILS(job(variables), kInvalidArgument, text);
}

}  // namespace
}  // namespace te_fl
