// The quarantine file in any state, and with concurrent writers.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <thread>

#include "dispatch/watch/barred.hpp"
#include "dispatch/watch/quarantine.hpp"
#include "dispatch/watch/quarantine_file.hpp"
#include "registry/registry_impl.hpp"
#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "support/sanitizers.hpp"
#include "support/temp_folder.hpp"
#include "support/threads.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl {
namespace {

using testing::Fake;
using testing::FiveCall;

Quarantine entry(const std::string& op, const std::string& impl = "default.x") {
  Quarantine q;
  q.op = op, q.impl_id = impl, q.owner = "somebody", q.build_id = "1";
  q.dtypes = TE_FL_BIT(TE_FL_F32), q.scalings = TE_FL_BIT(TE_FL_SCALING_NONE);
  q.reason = "made up";
  return q;
}

constexpr const char* kOne = R"({"op": "known", "impl": "default.x", "owner": "o", "build": "b",
    "chip": "", "driver": "", "dtypes": ["f32"], "scalings": ["none"]})";
constexpr const char* kNewer = R"({"op": "known", "impl": "default.x", "owner": "o", "build": "b",
    "chip": "", "driver": "", "dtypes": ["f2e7m9"], "scalings": ["none"]})";

std::string make_file(const std::string& entries) {
  return R"({"te_fl_quarantine": 1, "entries": [)" + entries + "]}";
}

class QuarantineFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    // Flushes the pending entries of earlier tests, so that they do not appear in this test's file.
    ASSERT_OK(environment::set("TE_FL_QUARANTINE_FILE", ""));
    ASSERT_OK(step_boundary());
    ASSERT_OK(environment::set("TE_FL_QUARANTINE_FILE", path));
    log::set_level(log::Level::kWarning);
    read_again();
  }
  void TearDown() override {
    log::set_level(level);
    ASSERT_OK(environment::set("TE_FL_QUARANTINE_FILE", ""));
    (void)step_boundary();
    ASSERT_OK(environment::unset("TE_FL_QUARANTINE_FILE"));
    read_again();
  }
  static void read_again() {
    dispatch::forget_quarantine_file();
    registry::choose_again();
  }
  // Expects a call of an op to succeed, with exactly one warning that names the quarantine file.
  void expect_call_works(const std::string& complaint) {
    OpRegistry registry;
    OpManager manager(registry);
    Fake fake("default.x");
    ASSERT_OK(registry.register_op(fake.desc, "test"));
    read_again();
    FiveCall call;
    ::testing::internal::CaptureStderr();
    const Status status = manager.call("test::five", &call.args);
    const std::string warnings = ::testing::internal::GetCapturedStderr();
    EXPECT_OK(status);
    EXPECT_HAS(warnings, path);
    EXPECT_HAS(warnings, complaint);
  }
  static std::vector<std::string> in_force() {
    std::vector<std::string> ops;
    const std::vector<Quarantine> list = quarantines().value();
    for (const Quarantine& q : list) ops.push_back(q.op);
    return ops;
  }

  test::TempFolder folder;
  std::string path = folder / "quarantine.json";
  log::Level level = log::level();
};

TEST_F(QuarantineFileTest, AnEmptyOneStopsNoOpAndIsWrittenOver) {
  for (const char* text : {"", " \n"}) {
    folder.write("quarantine.json", text);
    expect_call_works("is empty");
  }
  dispatch::hold(entry("found"));
  const Status status = step_boundary();
  EXPECT_OK(status);
  read_again();
  EXPECT_EQ(in_force(), std::vector<std::string>{"found"});
}

TEST_F(QuarantineFileTest, AForeignOrHalfWrittenOneStopsNoOpAndIsLeftAlone) {
  const std::string whole = make_file(kOne);
  for (const std::string& text : {whole.substr(0, whole.size() / 2), std::string("{"),
                                  std::string("\x7f"
                                              "ELF\0\1",
                                              6),
                                  std::string("[1, 2]"), std::string("{\"te_fl_policy\": 1}"),
                                  std::string("{\"te_fl_quarantine\": 2, \"entries\": [7]}"),
                                  std::string("{\"te_fl_quarantine\": \"1\", \"entries\": []}"),
                                  std::string("{\"te_fl_quarantine\": 1, \"entries\": {}}")}) {
    folder.write("quarantine.json", text);
    expect_call_works("passed over");
    dispatch::hold(entry("found"));
    const Status status = step_boundary();
    EXPECT_FALSE(status.ok()) << "it cannot be added to " << text;
    EXPECT_EQ(in_force(), std::vector<std::string>{"found"}) << "in force all the same";
    EXPECT_EQ(test::read_file(path), text) << "it may be somebody else's";
  }
}

TEST_F(QuarantineFileTest, AnEntryOfANewerTeFlIsPassedOverAndKept) {
  for (const std::string odd : {kNewer, "7", "{}", R"({"op": 1})"}) {
    folder.write("quarantine.json", make_file(odd + ", " + kOne));
    expect_call_works("number 0");
    EXPECT_EQ(in_force(), std::vector<std::string>{"known"});
    dispatch::hold(entry("found"));
    const Status status = step_boundary();
    ASSERT_OK(status);
    read_again();
    EXPECT_EQ(in_force(), (std::vector<std::string>{"known", "found"}));
  }
  folder.write("quarantine.json", make_file(kNewer));
  read_again();
  dispatch::hold(entry("found"));
  ASSERT_OK(step_boundary());
  EXPECT_HAS(test::read_file(path), "f2e7m9") << "the newer one needs it";
}

// An entry whose chip name is not valid UTF-8 would be read back with a different name that matches
// no chip, so the entry is refused. The other entries are written.
TEST_F(QuarantineFileTest, AnEntryThatWouldComeBackAsAnotherIsRefusedAndTheOthersAreWritten) {
  Quarantine odd = entry("odd");
  odd.chip = "cut off \xe2\x82";
  Quarantine plain = entry("said");
  // The reason may hold any bytes, as it is not used for look-up.
  plain.reason = "of any bytes: \xff";
  for (const Quarantine& q : {odd, plain}) dispatch::hold(q);
  const Status status = step_boundary();
  EXPECT_FAILS(status, kFailedPrecondition, "'default.x' of op 'odd'");
  EXPECT_HAS(status.message(), "UTF-8");
  EXPECT_EQ(in_force(), (std::vector<std::string>{"odd", "said"})) << "in this run all the same";
  read_again();
  EXPECT_EQ(in_force(), std::vector<std::string>{"said"});
}

TEST_F(QuarantineFileTest, OneThatCannotBeReadStopsNoOp) {
  std::filesystem::create_directory(path);
  expect_call_works("is a folder");
  std::filesystem::remove(path);
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  expect_call_works("is a device, a pipe or a socket");
  dispatch::hold(entry("found"));
  EXPECT_FALSE(step_boundary().ok());
  struct stat st {};
  ASSERT_EQ(stat(path.c_str(), &st), 0);
  EXPECT_TRUE(S_ISFIFO(st.st_mode)) << "not replaced";
}

// Runs `body` in a child, which may change its user and limits; returns 0 if `body` found no error.
template <class F>
int in_child(F&& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(body());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

TEST_F(QuarantineFileTest, NoPermissionToReadItStopsNoOp) {
  TE_FL_SKIP_FORK_THEN_THREADS();
  folder.write("quarantine.json", make_file(kOne));
  ASSERT_EQ(chmod(path.c_str(), 0), 0);
  ASSERT_EQ(chmod(folder.path().c_str(), 0755), 0);
  EXPECT_EQ(in_child([&] {
              if (geteuid() == 0 && setuid(65534) != 0) return 2;
              expect_call_works("Permission denied");
              return HasFailure() ? 1 : 0;
            }),
            0);
}

TEST_F(QuarantineFileTest, AFullDiskLeavesTheFileAsItWasAndTheQuarantineInForce) {
  TE_FL_SKIP_FORK_THEN_THREADS();
  folder.write("quarantine.json", make_file(kOne));
  EXPECT_EQ(in_child([&] {
              std::signal(SIGXFSZ, SIG_IGN);
              const rlimit none{64, 64};
              if (setrlimit(RLIMIT_FSIZE, &none) != 0) return 2;
              read_again();
              dispatch::hold(entry("found"));
              const Status status = step_boundary();
              if (status.ok()) return 3;
              if (status.message().find("cannot be written") == std::string::npos) return 4;
              return in_force() == std::vector<std::string>{"known", "found"} ? 0 : 5;
            }),
            0);
  EXPECT_EQ(test::read_file(path), make_file(kOne));
  for (const auto& file : std::filesystem::directory_iterator(folder.path())) {
    EXPECT_NE(file.path().extension(), ".part") << "nothing half-written is left";
  }
}

TEST_F(QuarantineFileTest, ThreadsThatEndTheirStepsAtOnceLoseNothing) {
  ASSERT_OK(environment::set("TE_FL_QUARANTINE_FILE", ""));
  log::set_level(log::Level::kOff);
  read_again();
  // The work grows with the square of the number of entries, so sanitizer builds add fewer.
  constexpr int kThreads = 6, kEach = TE_FL_ASAN || TE_FL_TSAN ? 100 : 500;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < kEach; ++i) {
        dispatch::hold(entry("op" + std::to_string(t), "default.x" + std::to_string(i)));
        EXPECT_OK(step_boundary());
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(quarantines()->size(), static_cast<size_t>(kThreads) * kEach);
}

// Pending entries of one thread are applied by another thread, while no stream is being captured.
// Each function runs on a thread of its own.
TEST_F(QuarantineFileTest, ThreadsHoldAndAskTogether) {
  int streams[2] = {};
  testing::together(
      40, {[](int round) { dispatch::hold(entry("op" + std::to_string(round))); },
           [](int) { dispatch::take_held(); }, [](int) { EXPECT_OK(quarantines()); },
           [&](int round) { dispatch::note_capture(Device{}, &streams[round % 2]); },
           [](int) { dispatch::quarantined_for("op0", "default.x", "somebody", Device{}); },
           [](int round) {
             if (round % 8 == 0) dispatch::forget_quarantine_file();
           }});
  dispatch::take_held();
  read_again();
  EXPECT_EQ(quarantines()->size(), 40u);
}

// An entry that a step adds while another one is being cleared stays in force, in memory and in the
// file.
TEST_F(QuarantineFileTest, ClearingOneLosesNoneThatIsBarredMeanwhile) {
  constexpr int kSteps = 40;
  std::atomic<bool> done{false};
  std::thread clearing([&] {
    while (!done.load()) {
      dispatch::hold(entry("cleared"));
      EXPECT_OK(step_boundary());
      EXPECT_OK(clear_quarantines("cleared", ""));
    }
  });
  std::vector<std::string> barred;
  for (int i = 0; i < kSteps; ++i) {
    barred.push_back("barred" + std::to_string(i));
    dispatch::hold(entry(barred.back()));
    EXPECT_OK(step_boundary());
  }
  done = true;
  clearing.join();
  const auto lost = [&] {
    std::vector<std::string> out, found = in_force();
    for (const std::string& op : barred) {
      if (std::find(found.begin(), found.end(), op) == found.end()) out.push_back(op);
    }
    return out;
  };
  EXPECT_EQ(lost(), std::vector<std::string>());
  read_again();
  EXPECT_EQ(lost(), std::vector<std::string>()) << "in the file";
}

// Clearing tens of thousands of entries is fast: entries are looked up, and lists are not compared
// pairwise, which would take minutes.
TEST_F(QuarantineFileTest, ManyAreAddedAndClearedInAMoment) {
  const int many = TE_FL_ASAN || TE_FL_TSAN ? 2000 : 30000;
  std::vector<Quarantine> entries;
  for (int i = 0; i < many; ++i) {
    entries.push_back(entry(i % 2 == 0 ? "even" : "odd", "default.x" + std::to_string(i)));
  }
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_OK(dispatch::add_to_quarantine_file(path, entries));
  read_again();
  ASSERT_EQ(in_force().size(), static_cast<size_t>(many));
  const auto cleared = clear_quarantines("even", "");
  ASSERT_OK(cleared);
  EXPECT_EQ(*cleared, many / 2);
  EXPECT_EQ(in_force(), std::vector<std::string>(static_cast<size_t>(many / 2), "odd"));
  read_again();
  EXPECT_EQ(in_force(), std::vector<std::string>(static_cast<size_t>(many / 2), "odd"))
      << "in file";
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
}

TEST_F(QuarantineFileTest, ProcessesAndThreadsThatWriteAtOnceLoseNothing) {
  TE_FL_SKIP_FORK_THEN_THREADS();
  log::set_level(log::Level::kOff);
  constexpr int kProcesses = 4, kThreads = 3, kEach = 8;
  std::vector<pid_t> children;
  for (int p = 0; p < kProcesses; ++p) {
    children.push_back(fork());
    if (children.back() != 0) continue;
    alarm(120);
    std::atomic<int> failed{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < kEach; ++i) {
          dispatch::hold(entry("p" + std::to_string(p) + "t" + std::to_string(t),
                               "default.x" + std::to_string(i)));
          if (!step_boundary().ok()) ++failed;
        }
      });
    }
    for (std::thread& t : threads) t.join();
    _exit(failed == 0 ? 0 : 1);
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
  read_again();
  EXPECT_EQ(quarantines()->size(), static_cast<size_t>(kProcesses) * kThreads * kEach);
}

}  // namespace
}  // namespace te_fl
