// Tests the line that names an implementation in which a signal ends the process, and that the
// signal is passed on. Each crash happens in a forked child whose stderr is read.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <new>
#include <regex>
#include <sstream>
#include <string>
#include <thread>

#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "support/sanitizers.hpp"
#include "te_fl/environment.hpp"

namespace te_fl {
namespace {

using testing::Fake;
using testing::FiveCall;

struct Ended {
  std::string text;  // the stderr of the child
  int status = 0;    // of waitpid()

  // A sanitizer ends the process by itself after its report.
  bool by(int signal) const {
    return TE_FL_ASAN || TE_FL_TSAN ? status != 0
                                    : WIFSIGNALED(status) && WTERMSIG(status) == signal;
  }
  int lines() const {
    int count = 0;
    for (size_t at = text.find("te-fl error: "); at != std::string::npos; ++count) {
      at = text.find("te-fl error: ", at + 1);
    }
    return count;
  }
  // True if the pattern matches in a line. std::regex recurses for each character, and a
  // sanitizer's report has lines that are too long for that.
  bool has(const std::string& pattern) const {
    const std::regex wanted(pattern);
    std::istringstream all(text);
    for (std::string line; std::getline(all, line);) {
      if (line.size() < 2000 && std::regex_search(line, wanted)) return true;
    }
    return false;
  }
};

// Runs `body` in a child and returns how the child ended.
Ended in_child(const std::function<void()>& body) {
  int ends[2];
  if (pipe(ends) != 0) std::abort();
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    dup2(ends[1], STDERR_FILENO);
    body();
    _exit(0);
  }
  close(ends[1]);
  Ended ended;
  char part[512];
  for (ssize_t n; (n = read(ends[0], part, sizeof part)) > 0;)
    ended.text.append(part, static_cast<size_t>(n));
  close(ends[0]);
  waitpid(child, &ended.status, 0);
  return ended;
}

// Reads address 16, which no process has.
void read_nowhere() {
  volatile const int* volatile nowhere = reinterpret_cast<const int*>(uintptr_t{16});
  (void)*nowhere;
}

class CrashReport : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(registry.register_op(crashing.desc, "acme_plugin", "acme"));
    op = *registry.find("test::five");
    crashing.run_body = [this](const te_fl_context&, const void*) {
      crash();
      return te_fl_status{TE_FL_OK};
    };
  }
  void call() { (void)manager.call(op, &five.args); }

  OpRegistry registry;
  OpManager manager{registry};
  Fake crashing{"vendor.acme"};
  std::function<void()> crash = &read_nowhere;
  FiveCall five;
  OpId op;
};

TEST_F(CrashReport, NamesTheImplementationTheOpAndTheArguments) {
  const Ended ended = in_child([&] { call(); });
  EXPECT_TRUE(ended.by(SIGSEGV)) << ended.text;
  EXPECT_EQ(ended.lines(), 1);
  EXPECT_TRUE(
      ended.has("te-fl error: SIGSEGV at address 0x10 in run\\(\\) of 'vendor.acme' "
                "\\(plugin acme_plugin\\), op 'test::five', with a f32\\[[0-9,]+\\] at "
                "0x[0-9a-f]+, b f32.*, out f32.*; thread [0-9]+; process [0-9]+; "
                ".*TE_FL_CRASH_REPORT=0"))
      << ended.text;
}

TEST_F(CrashReport, NamesEachSignal) {
  struct Case {
    int signal;
    const char* name;
  };
  for (const Case& c : {Case{SIGSEGV, "SIGSEGV"}, Case{SIGBUS, "SIGBUS"}, Case{SIGILL, "SIGILL"},
                        Case{SIGFPE, "SIGFPE"}, Case{SIGABRT, "SIGABRT"}}) {
    crash = [&] { raise(c.signal); };
    const Ended ended = in_child([&] { call(); });
    EXPECT_TRUE(ended.by(c.signal)) << c.name << ended.text;
    EXPECT_EQ(ended.lines(), 1) << c.name << ended.text;
    EXPECT_TRUE(ended.has(std::string("te-fl error: ") + c.name + " in run")) << ended.text;
  }
  crash = [] { std::abort(); };
  const Ended ended = in_child([&] { call(); });
  EXPECT_TRUE(ended.by(SIGABRT)) << ended.text;
  EXPECT_EQ(ended.lines(), 1) << ended.text;
}

TEST_F(CrashReport, NamesTheFunctionAndTheRank) {
  crashing.desc.flags &= ~uint32_t{TE_FL_OP_STATIC_SUPPORT};
  crashing.desc.supports = [](void*, const te_fl_context*, const void*) {
    read_nowhere();
    return te_fl_status{TE_FL_OK};
  };
  OpRegistry other;
  OpManager asking(other);
  ASSERT_OK(other.register_op(crashing.desc, "acme_plugin", "acme"));
  const Ended ended = in_child([&] {
    setenv("RANK", "3", 1);
    (void)environment::reload();
    (void)asking.call(*other.find("test::five"), &five.args);
  });
  EXPECT_TRUE(
      ended.has("te-fl error: rank 3: SIGSEGV at address 0x10 in supports\\(\\) of "
                "'vendor.acme'"))
      << ended.text;
}

TEST_F(CrashReport, WritesNothingOutsideOfImplementations) {
  const Ended after = in_child([&] {
    crash = [] {};
    call();
    read_nowhere();
  });
  EXPECT_TRUE(after.by(SIGSEGV)) << after.text;
  EXPECT_EQ(after.lines(), 0) << after.text;
}

TEST_F(CrashReport, IsLeftOutByTheSetting) {
  const Ended unset = in_child([&] {
    (void)environment::set("TE_FL_CRASH_REPORT", "0");
    call();
  });
  EXPECT_TRUE(unset.by(SIGSEGV)) << unset.text;
  EXPECT_EQ(unset.lines(), 0) << unset.text;
}

TEST_F(CrashReport, NamesTheInnerOpOfTwo) {
  Fake inner{"vendor.inner", testing::save_schema(true)};
  ASSERT_OK(registry.register_op(inner.desc, "inner_plugin", "acme"));
  auto x = Tensor::zeros({2}, DType::kF32), y = Tensor::zeros({2}, DType::kF32);
  ASSERT_OK(x);
  ASSERT_OK(y);
  testing::SaveArgs args;
  args.x = *x;
  args.y = *y;
  const auto nested = [&] { (void)manager.call(*registry.find("test::save_fwd"), &args); };
  crash = nested;
  inner.run_body = [](const te_fl_context&, const void*) {
    read_nowhere();
    return te_fl_status{TE_FL_OK};
  };
  const Ended in_inner = in_child([&] { call(); });
  EXPECT_TRUE(in_inner.has("of 'vendor.inner' \\(plugin inner_plugin\\), op 'test::save_fwd'"))
      << in_inner.text;
  inner.run_body = nullptr;
  crash = [&] {
    nested();
    read_nowhere();
  };
  const Ended in_outer = in_child([&] { call(); });
  EXPECT_TRUE(in_outer.has("of 'vendor.acme' \\(plugin acme_plugin\\), op 'test::five'"))
      << in_outer.text;
}

TEST_F(CrashReport, NamesTheCallThatAThreadOfThePluginWorksFor) {
  TE_FL_SKIP_FORK_THEN_THREADS();
  crash = [] { std::thread(&read_nowhere).join(); };
  const Ended ended = in_child([&] { call(); });
  EXPECT_TRUE(ended.by(SIGSEGV)) << ended.text;
  EXPECT_TRUE(
      ended.has("SIGSEGV at address 0x10 on a thread that runs no op; other threads are "
                "inside run\\(\\) of 'vendor.acme' \\(plugin acme_plugin\\), op "
                "'test::five'"))
      << ended.text;
}

TEST_F(CrashReport, SurvivesArgumentsThatCannotBeRead) {
  if (TE_FL_TSAN) GTEST_SKIP() << "the thread sanitizer ends a process whose handler faults";
  // The plugin unmaps the shape that its own arguments point to, and then fails.
  void* page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(page, MAP_FAILED);
  auto* tensor = new (page) te_fl_tensor(*five.args.b);
  five.args.b = tensor;
  crash = [&] {
    munmap(page, 4096);
    read_nowhere();
  };
  const Ended ended = in_child([&] { call(); });
  EXPECT_TRUE(ended.by(SIGSEGV)) << ended.text;
  EXPECT_EQ(ended.lines(), 1) << ended.text;
  EXPECT_TRUE(
      ended.has("SIGSEGV at address 0x10 in run\\(\\) of 'vendor.acme' \\(plugin "
                "acme_plugin\\), op 'test::five', with a f32.*; the rest cannot be read"))
      << ended.text;
}

void say_earlier(int, siginfo_t* info, void*) {
  const bool at = info->si_addr == reinterpret_cast<void*>(uintptr_t{16});
  (void)!write(STDERR_FILENO, at ? "earlier 16\n" : "earlier\n", at ? 11 : 8);
  _exit(7);
}

// Sets `handler` for SIGSEGV and returns the action before it.
struct sigaction set_handler(void (*handler)(int, siginfo_t*, void*)) {
  struct sigaction action {
  }, before{};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, &before);
  return before;
}

// A process started anew, because a forked child inherits te-fl's handlers from earlier tests.
TEST_F(CrashReport, PassesTheSignalToAnEarlierHandler) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        set_handler(&say_earlier);
        call();
      },
      ::testing::ExitedWithCode(7), "te-fl error: SIGSEGV at address 0x10 in run(.|\n)*earlier 16");
}

struct sigaction g_before_later;
void pass_to_earlier(int signal, siginfo_t* info, void* context) {
  (void)!write(STDERR_FILENO, "later\n", 6);
  g_before_later.sa_sigaction(signal, info, context);
}

TEST_F(CrashReport, WorksBelowALaterHandler) {
  const Ended ended = in_child([&] {
    (void)manager.resolve(op, &five.args);
    crash = [] {};
    call();
    crash = &read_nowhere;
    g_before_later = set_handler(&pass_to_earlier);
    call();
  });
  EXPECT_TRUE(ended.by(SIGSEGV)) << ended.text;
  EXPECT_TRUE(ended.has("te-fl error: SIGSEGV at address 0x10 in run")) << ended.text;
  EXPECT_LT(ended.text.find("later\n"), ended.text.find("te-fl error: ")) << ended.text;
  EXPECT_EQ(ended.lines(), 1) << ended.text;
}

TEST_F(CrashReport, WorksOnAnAlternateStackAfterAnOverflow) {
  if (TE_FL_ASAN || TE_FL_TSAN) GTEST_SKIP() << "the sanitizer has an alternate stack of its own";
  static const std::function<int(int)> deep = [](int depth) {
    volatile char room[4096];
    room[0] = static_cast<char>(depth);
    return deep(depth + 1) + room[0];
  };
  crash = [] { (void)deep(0); };
  const Ended ended = in_child([&] {
    static char stack[64 << 10];
    const stack_t alternate{stack, 0, sizeof stack};
    sigaltstack(&alternate, nullptr);
    call();
  });
  EXPECT_TRUE(ended.by(SIGSEGV)) << ended.text;
  EXPECT_TRUE(ended.has("te-fl error: SIGSEGV at address 0x[0-9a-f]+ in run")) << ended.text;
}

TEST_F(CrashReport, NamesTheSenderOfASignal) {
  crash = [] {
    const pid_t child = fork();
    if (child == 0) {
      kill(getppid(), SIGABRT);
      _exit(0);
    }
    for (;;) pause();
  };
  const Ended ended = in_child([&] { call(); });
  EXPECT_TRUE(ended.by(SIGABRT)) << ended.text;
  EXPECT_TRUE(ended.has("te-fl error: SIGABRT from process [0-9]+ in run")) << ended.text;
}

TEST_F(CrashReport, LeavesIgnoredSignalsIgnored) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        std::signal(SIGFPE, SIG_IGN);
        crash = [] { raise(SIGFPE); };
        call();
        struct sigaction now {};
        sigaction(SIGFPE, nullptr, &now);
        _exit(now.sa_handler == SIG_IGN ? 7 : 8);
      },
      ::testing::ExitedWithCode(7), "");
}

}  // namespace
}  // namespace te_fl
