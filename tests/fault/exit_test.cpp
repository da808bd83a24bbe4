// exit() may end a program at any point of other threads' work with te-fl. Each case runs in its
// own process: a thread enters a function of the plugin "mortal", whose static objects exit()
// destroys, and then the main thread or another thread calls exit().
#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "fault_fixture.hpp"

namespace te_fl::test {
namespace {

constexpr const char* kState = "TEST_EXIT_STATE";
constexpr const char* kFromMain = "TEST_EXIT_FROM_MAIN";
constexpr const char* kDelay = "TEST_EXIT_AFTER_US";

const char* g_state = nullptr;
std::atomic<bool> g_there{false};

void arrived(const char* where) {
  if (std::strcmp(where, g_state) == 0) g_there = true;
}

const Device kDevice = parse_device("ext:fault:0").value();

// Calls every plugin function that te-fl uses, from loading to unloading. After exit() began, each
// call is refused, and no thread may enter the plugin again.
void use_all() {
  if (!plugins::load(fault_path("mortal")).ok()) return;
  for (int i = 0; i < 3; ++i) {
    Result<Tensor> in = floats({-1, 2}).to(kDevice);
    Result<Tensor> out = Tensor::empty({2}, DType::kF32, kDevice);
    if (!in.ok() || !out.ok()) return;
    for (int k = 0; k < 2; ++k) (void)call_relu(*in, *out);
  }
  (void)plugins::deactivate("mortal", true);
}

// Runs in its own process.
TEST(Exit, DISABLED_InAState) {
  g_state = std::getenv(kState);
  ASSERT_NE(g_state, nullptr);
  alarm(60);
  char address[32];
  std::snprintf(address, sizeof address, "%llx",
                static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(&arrived)));
  setenv("FAULT_EVENTS", address, 1);
  const auto wait_and_exit = [] {
    while (!g_there) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(std::atoi(std::getenv(kDelay))));
    std::exit(0);
  };
  std::thread([] {
    use_all();
    for (;;) use_all();
  }).detach();
  if (std::getenv(kFromMain) != nullptr) wait_and_exit();
  std::thread([&] {
    (void)OpManager::instance().usage();  // creates te-fl's record for this thread
    wait_and_exit();
  }).join();
}

int exit_status(const char* state, bool from_main, int us) {
  const pid_t child = fork();
  if (child == 0) {
    setenv(kState, state, 1);
    setenv(kDelay, std::to_string(us).c_str(), 1);
    if (from_main) setenv(kFromMain, "1", 1);
    execl("/proc/self/exe", "exit_test", "--gtest_filter=Exit.DISABLED_InAState",
          "--gtest_also_run_disabled_tests", "--gtest_brief=1", nullptr);
    _exit(127);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

class ExitDuring : public ::testing::TestWithParam<const char*> {};

TEST_P(ExitDuring, EndsWell) {
  for (const bool from_main : {true, false}) {
    for (const int us : {0, 10'000, 40'000}) {
      EXPECT_EQ(exit_status(GetParam(), from_main, us), 0)
          << (from_main ? "the main thread exits " : "another thread exits ") << us << " us after";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Exit, ExitDuring,
                         ::testing::Values("opening", "loading", "registering", "copying",
                                           "calling", "freeing", "unloading"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace te_fl::test
