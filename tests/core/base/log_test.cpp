#include "te_fl/log.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>

#include "support/expect.hpp"
#include "support/sanitizers.hpp"
#include "support/threads.hpp"
#include "te_fl/environment.hpp"

namespace te_fl::log {
namespace {

class Log : public ::testing::Test {
 protected:
  void SetUp() override { set_level(Level::kInfo); }
};

std::string captured(const std::function<void()>& f) {
  ::testing::internal::CaptureStderr();
  f();
  return ::testing::internal::GetCapturedStderr();
}

TEST_F(Log, WritesLevelNameAndTextToStderr) {
  const std::string text = captured([] { warning("plugin acme is absent"); });
  EXPECT_HAS(text, "te-fl warning: plugin acme is absent\n");
}

TEST_F(Log, BracesAreText) {
  EXPECT_HAS(captured([] { info("{} {0} %s"); }), ": {} {0} %s\n");
}

TEST_F(Log, LevelsFilter) {
  for (int threshold = 0; threshold <= 5; ++threshold) {
    set_level(static_cast<Level>(threshold));
    EXPECT_EQ(static_cast<int>(level()), threshold);
    for (int i = 0; i < 5; ++i) {
      const auto message = static_cast<Level>(i);
      EXPECT_EQ(enabled(message), i >= threshold);
      EXPECT_EQ(captured([&] { write(message, "m"); }).empty(), i < threshold);
    }
  }
  EXPECT_FALSE(enabled(Level::kOff));
}

TEST_F(Log, OnceIsOncePerKey) {
  const std::string text = captured([] {
    for (int i = 0; i < 3; ++i) once(Level::kWarning, "log_test.key", "only once");
    once(Level::kWarning, "log_test.other", "another");
  });
  EXPECT_EQ(text.find("only once"), text.rfind("only once"));
  EXPECT_HAS(text, "another");
}

TEST_F(Log, CodeWinsOverAReload) {
  set_level(Level::kError);
  setenv("TEFL_LOG_LEVEL", "TRACE", 1);
  ASSERT_OK(environment::reload());
  EXPECT_EQ(level(), Level::kError);
  ASSERT_OK(environment::set("TEFL_LOG_LEVEL", "debug"));
  EXPECT_EQ(level(), Level::kDebug);
  ASSERT_OK(environment::unset("TEFL_LOG_LEVEL"));
  EXPECT_EQ(level(), Level::kTrace) << "back to the environment";
  unsetenv("TEFL_LOG_LEVEL");
  ASSERT_OK(environment::reload());
  EXPECT_EQ(level(), Level::kInfo);
}

TEST_F(Log, ThreadsDoNotMixLines) {
  const std::string text = captured([] {
    std::thread threads[4];
    for (auto& t : threads) {
      t = std::thread([] {
        for (int i = 0; i < 50; ++i) info("one-unbroken-line");
      });
    }
    for (auto& t : threads) t.join();
  });
  size_t lines = 0, whole = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at);
    ++lines;
    whole += text.substr(at, end - at).find("info: one-unbroken-line") != std::string::npos;
    at = end + 1;
  }
  EXPECT_EQ(lines, 200u);
  EXPECT_EQ(whole, 200u);
}

TEST_F(Log, ThreadsSayEachThingOnce) {
  const std::string text = captured([] {
    const auto say = [](int round) {
      const std::string word = "thing" + std::to_string(round) + ".";
      once(Level::kWarning, "log_test " + word, word);
    };
    testing::together(50, {say, say, say});
  });
  for (int i = 0; i < 50; ++i) {
    const std::string word = "thing" + std::to_string(i) + ".";
    EXPECT_NE(text.find(word), std::string::npos) << word;
    EXPECT_EQ(text.find(word), text.rfind(word)) << word;
  }
}

TEST_F(Log, AForkedChildCanWrite) {
  TE_FL_SKIP_FORK_WHILE_ALLOCATING();
  ::testing::internal::CaptureStderr();
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    while (!stop) info("busy");
  });
  for (int i = 0; i < 10; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(20);
      info("child");
      _exit(0);
    }
    int result = 0;
    ASSERT_EQ(waitpid(child, &result, 0), child);
    EXPECT_EQ(result, 0);
  }
  stop = true;
  writer.join();
  EXPECT_HAS(::testing::internal::GetCapturedStderr(), "info: child");
}

}  // namespace
}  // namespace te_fl::log
