// Two copies of te-fl in one process, as two frameworks may load them, each with the same plugin.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

namespace {

using DriverRun = const char* (*)(const char* plugin, void** manager);

DriverRun open_driver(const char* path) {
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    ADD_FAILURE() << dlerror();
    return nullptr;
  }
  return reinterpret_cast<DriverRun>(dlsym(handle, "fault_run"));
}

TEST(TwoCopies, WorkSideBySide) {
  const DriverRun first = open_driver(FAULT_DRIVER_SHARED);
  const DriverRun second = open_driver(FAULT_DRIVER_SECOND);
  ASSERT_TRUE(first != nullptr && second != nullptr);
  void* manager[2] = {nullptr, nullptr};
  const char* problem = first(FAULT_GOOD, &manager[0]);
  EXPECT_EQ(problem, nullptr) << problem;
  problem = second(FAULT_GOOD, &manager[1]);
  EXPECT_EQ(problem, nullptr) << problem;
  EXPECT_NE(manager[0], manager[1]) << "both drivers use one copy: the test tests nothing";
}

// One copy is in the global symbol scope, as in a program that links te-fl, and the other is
// private. The next test runs this one in a child process.
TEST(TwoCopies, DISABLED_OneOfThemGlobal) {
  void* global = dlopen(FAULT_SHARED_LIBRARY, RTLD_NOW | RTLD_GLOBAL);
  ASSERT_NE(global, nullptr) << dlerror();
  const DriverRun first = open_driver(FAULT_DRIVER_SHARED);
  const DriverRun second = open_driver(FAULT_DRIVER_SECOND);
  ASSERT_TRUE(first != nullptr && second != nullptr);
  void* manager = nullptr;
  const char* problem = first(FAULT_GOOD, &manager);
  EXPECT_EQ(problem, nullptr) << problem;
  problem = second(FAULT_GOOD, &manager);
  // The symbols of the second test library resolve to the global copy of te-fl, in which the plugin
  // is already loaded. Loading it again is an error, and nothing crashes.
  ASSERT_NE(problem, nullptr);
  EXPECT_NE(std::string(problem).find("ALREADY_EXISTS"), std::string::npos) << problem;
}

TEST(TwoCopies, AGlobalOneDoesNotMixWithTheOther) {
  const std::string command = std::string(
      "/proc/self/exe --gtest_also_run_disabled_tests "
      "--gtest_filter=TwoCopies.DISABLED_OneOfThemGlobal > /dev/null 2>&1");
  char self[4096] = {};
  ASSERT_NE(realpath("/proc/self/exe", self), nullptr);
  EXPECT_EQ(std::system((self + command.substr(std::string("/proc/self/exe").size())).c_str()), 0);
}

// Opens te-fl, uses it on another thread, and closes it before that thread ends. The thread has no
// thread-local object of the library, which would keep the library loaded.
[[noreturn]] void close_before_a_thread_ends() {
  void* handle = dlopen(FAULT_DRIVER_SHARED, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) _exit(2);
  const auto ask = reinterpret_cast<int (*)()>(dlsym(handle, "fault_ask"));
  std::atomic<int> stage{0};
  int result = -1;
  std::thread thread([&] {
    result = ask();
    stage = 1;
    while (stage != 2) std::this_thread::yield();
  });
  while (stage != 1) std::this_thread::yield();
  dlclose(handle);
  stage = 2;
  thread.join();
  _exit(result == 0 ? 0 : 3);
}

TEST(OneCopyDeathTest, AThreadMayEndAfterTheLibraryWasClosed) {
  EXPECT_EXIT(close_before_a_thread_ends(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
