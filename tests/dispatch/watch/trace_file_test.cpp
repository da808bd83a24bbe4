// The trace file (TE_FL_TRACE) of a forked child, and the errors if it cannot be written.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <nlohmann/json.hpp>

#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "support/far_device.hpp"
#include "support/temp_folder.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl {
namespace {

using nlohmann::json;
using testing::Fake;
using testing::FiveCall;

class TraceFile : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_OK(registry.register_op(fake.desc, "test")); }
  void TearDown() override { ASSERT_OK(environment::unset("TE_FL_TRACE")); }
  void trace_to(const std::string& path) { ASSERT_OK(environment::set("TE_FL_TRACE", path)); }
  bool call() { return manager.call("test::five", &five.args).ok(); }
  // Returns the number of calls in a trace; -1 if the file is not a trace.
  static int calls_in(const std::string& path) {
    const json trace = json::parse(test::read_file(path), nullptr, false);
    if (!trace.is_object()) return -1;
    int calls = 0;
    for (const json& e : trace.at("traceEvents")) calls += e.at("ph") == "X" ? 1 : 0;
    return calls;
  }
  // Forks a child that runs `body`, which returns 0 on success; returns the child's process id.
  template <class F>
  static pid_t in_child(F&& body) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      _exit(body());
    }
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    return child;
  }

  test::TempFolder folder;
  OpRegistry registry;
  OpManager manager{registry};
  Fake fake{"default.x"};
  FiveCall five;
};

TEST_F(TraceFile, ADeviceOfAnyNameHasATrack) {
  testing::FarDevice far;
  far.desc.provider = "odd\xff";
  const Device device = devices::add(&far.desc).value();
  Fake native("vendor.native");
  native.desc.device_types = uint64_t{1} << TE_FL_DEVICE_EXT;
  native.desc.provider = far.desc.provider;
  native.desc.vendor = "acme";
  ASSERT_OK(registry.register_op(native.desc, "test", "acme"));
  const std::string path = folder / "trace.json";
  trace_to(path);
  {
    const Tensor x = Tensor::zeros({4}, DType::kF32, device).value();
    const Tensor y = Tensor::zeros({4}, DType::kF32, device).value();
    testing::FiveArgs args;
    args.a = args.b = args.c = args.d = x.c();
    args.out = y.c();
    const Status status = manager.call("test::five", &args);
    EXPECT_OK(status);
  }
  EXPECT_OK(write_trace());
  EXPECT_GE(calls_in(path), 1);  // includes this process's calls of earlier tests
  EXPECT_HAS(test::read_file(path), "odd\xef\xbf\xbd:0 stream");
  EXPECT_OK(devices::remove(device));
}

TEST_F(TraceFile, AForkedChildTracesItsOwnCallsIntoItsOwnFile) {
  for (const char* name : {"trace-%p.json", "trace.json"}) {
    trace_to(folder / name);
    ASSERT_TRUE(call());
    ASSERT_OK(write_trace());
    const bool named = std::string(name).find("%p") != std::string::npos;
    const auto trace_path = [&](pid_t process) {
      const std::string number = std::to_string(process);
      if (named) return folder / ("trace-" + number + ".json");
      return folder / (process == getpid() ? "trace.json" : "trace.json." + number);
    };
    // Includes this process's calls of earlier tests.
    const int before = calls_in(trace_path(getpid()));
    const pid_t child = in_child([&] {
      if (!call()) return 1;
      // Changing another setting must not change the name of the child's trace file.
      if (!environment::set("TE_FL_SYNC", "0").ok() || !call() || !call()) return 2;
      return write_trace().ok() ? 0 : 3;
    });
    ASSERT_OK(write_trace());
    EXPECT_EQ(calls_in(trace_path(getpid())), before);
    EXPECT_EQ(calls_in(trace_path(child)), 3);
    in_child([&] { return write_trace().ok() ? 0 : 1; });  // a child that makes no call
    EXPECT_EQ(calls_in(trace_path(getpid())), before) << "the child left it alone";
  }
}

TEST_F(TraceFile, AFullDiskLeavesTheOldOneAndSaysSo) {
  const std::string path = folder.write("trace.json", "old");
  trace_to(path);
  ASSERT_TRUE(call());
  in_child([&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{64, 64};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
    if (!environment::set("TE_FL_TRACE", folder / "child.json").ok() || !call()) return 2;
    const Status status = write_trace();
    return status.message().find("File too large") != std::string::npos ? 0 : 3;
  });
  EXPECT_EQ(test::read_file(path), "old");
}

TEST_F(TraceFile, OneThatIsNoTraceIsAnErrorThatNamesIt) {
  trace_to(folder / "trace.json");
  ASSERT_TRUE(call());
  ASSERT_OK(write_trace());
  const std::string whole = test::read_file(folder / "trace.json");
  std::vector<std::string> texts = {
      "",
      "{}",
      "[]",
      "\x7f"
      "ELF",
      R"({"te_fl_calls": [], "traceEvents": [{"ph": 7}]})",
      R"({"te_fl_calls": [], "traceEvents": [{"ph": "X", "pid": "a"}]})",
      R"({"te_fl_calls": [7], "traceEvents":
                                        [{"ph": "X", "pid": 1, "args": {"call": 0}}]})"};
  for (size_t bytes = 1; bytes < whole.size(); bytes += 97) texts.push_back(whole.substr(0, bytes));
  for (const std::string& text : texts) {
    const auto tuned = tune({folder.write("bad.json", text)}, 0.001);
    const bool nothing = tuned.ok() && tuned->empty();  // an empty trace is valid
    EXPECT_TRUE(nothing || tuned.status().message().find("bad.json") != std::string::npos)
        << text.substr(0, 60) << ": " << tuned.status().to_string();
  }
  EXPECT_HAS(tune({folder.path()}, 0.001).status().message(), folder.path());
  EXPECT_HAS(tune({folder / "none"}, 0.001).status().message(), "No such");
}

TEST_F(TraceFile, WhatIsNoRegularFileIsRefusedAndStays) {
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& path : {pipe, folder.path()}) {
    trace_to(path);
    // The first call fails, so that the error does not appear only at the end of a long run.
    const Status status = manager.call("test::five", &five.args);
    EXPECT_HAS(status.message(), "is a ") << status.to_string();
  }
  struct stat st {};
  ASSERT_EQ(stat(pipe.c_str(), &st), 0);
  EXPECT_TRUE(S_ISFIFO(st.st_mode)) << "a name such as /dev/stdout must not become a file";
  trace_to(folder / "no/folder/trace.json");
  EXPECT_HAS(manager.call("test::five", &five.args).message(), "No such file");
}

}  // namespace
}  // namespace te_fl
