// A device is withdrawn while another plugin's op runs on it, while one of its own functions runs,
// and while dispatch decisions, handles and plans for it are cached. The plugin "owner" provides
// the device, and the plugin "guest" adds ops to it. The tensors' memory is foreign, so that it
// does not keep the device.
#include <atomic>
#include <condition_variable>
#include <functional>
#include <stdexcept>
#include <thread>

#include "fault_fixture.hpp"
#include "support/expect.hpp"

namespace te_fl::test {
namespace {

using plugins::State;

// Records the plugin calls in order. The first thread that reaches `stop_at` blocks there until
// let_go(); every thread that reaches `throw_at` throws.
class Stage {
 public:
  static Stage& now() {
    static auto* const stage = new Stage;
    return *stage;
  }
  void reset() {
    const std::lock_guard lock(mutex_);
    heard_.clear();
    stop_at_.clear();
    throw_at_.clear();
    stopped_ = 0;
    action_ = nullptr;
  }
  void stop_at(const std::string& event) {
    const std::lock_guard lock(mutex_);
    stop_at_ = event;
  }
  void throw_at(const std::string& event) {
    const std::lock_guard lock(mutex_);
    throw_at_ = event;
  }
  // Runs `action` once, on the thread that reaches `event`.
  void act_at(const std::string& event, std::function<void()> action) {
    const std::lock_guard lock(mutex_);
    act_at_ = event;
    action_ = std::move(action);
  }
  // Waits until a thread has stopped at `stop_at`.
  void wait_until_stopped() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stopped_ > 0; });  // stays positive until reset()
  }
  void let_go() {
    const std::lock_guard lock(mutex_);
    stop_at_.clear();
    heard_.emplace_back("let go");
    changed_.notify_all();
  }
  bool heard(const std::string& event) const { return count(event) > 0; }
  int count(const std::string& event) const {
    const std::lock_guard lock(mutex_);
    return static_cast<int>(std::count(heard_.begin(), heard_.end(), event));
  }
  // Returns the position of the first `event`; the end if it never occurred.
  size_t place(const std::string& event) const {
    const std::lock_guard lock(mutex_);
    return static_cast<size_t>(std::find(heard_.begin(), heard_.end(), event) - heard_.begin());
  }
  std::string all() const {
    const std::lock_guard lock(mutex_);
    std::string text;
    for (const std::string& event : heard_) text += event + "; ";
    return text;
  }
  static void hear(const char* text) { now().met(text); }

 private:
  void met(const std::string& event) {
    std::unique_lock lock(mutex_);
    heard_.push_back(event);
    if (event == act_at_ && action_ != nullptr) {
      const std::function<void()> action = std::exchange(action_, nullptr);
      lock.unlock();
      action();
      lock.lock();
    }
    if (event == throw_at_) throw std::runtime_error("thrown in " + event);
    if (event != stop_at_ || stopped_ > 0) return;
    ++stopped_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return event != stop_at_; });
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> heard_;
  std::string stop_at_, throw_at_, act_at_;
  std::function<void()> action_;
  int stopped_ = 0;
};

class Withdrawal : public FaultTest {
 protected:
  void SetUp() override {
    FaultTest::SetUp();
    stage.reset();
    char address[32];
    std::snprintf(address, sizeof address, "%llx",
                  static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(&Stage::hear)));
    setenv("FAULT_EVENTS", address, 1);
    load("owner");
    load("guest");
    device = parse_device("ext:owner:0").value();
    in = foreign(in_memory);
    out = foreign(out_memory);
    args.input = in;
    args.output = out;
  }
  void TearDown() override {
    EXPECT_OK(environment::unset("TE_FL_VALIDATE"));
    FaultTest::TearDown();
    EXPECT_FALSE(stage.heard("destroy with objects")) << stage.all();
  }
  // Returns a tensor over foreign memory, which te-fl neither counts as the device's memory nor
  // frees.
  Tensor foreign(float* memory) const {
    const int64_t shape[] = {kElements};
    return Tensor::wrap(memory, shape, {}, DType::kF32, device, nullptr).value();
  }
  Status call(void* stream = nullptr) {
    CallOptions options;
    options.stream = stream;
    return OpManager::instance().call(op::relu, &args, options);
  }
  void expect_right() {
    for (int i = 0; i < kElements; ++i) EXPECT_EQ(out_memory[i], i % 2 == 0 ? 0 : i) << i;
  }
  static void expect_refusal(const Status& status) {
    EXPECT_FAILS(status, kUnsupported, "device ext:owner:0 was withdrawn");
  }
  // Withdraws the owner while a thread, started with `enter`, is inside `event`. The withdrawal
  // bars the device and then waits until the thread has left.
  void expect_withdrawal_waits(const std::string& event, const std::function<void()>& enter) {
    SCOPED_TRACE(event);
    stage.stop_at(event);
    std::thread inside(enter);
    stage.wait_until_stopped();
    std::atomic<bool> withdrawn{false};
    Status status;
    std::thread withdrawing([&] {
      status = plugins::deactivate("owner");
      withdrawn = true;
    });
    // The device is barred: calls are refused without entering it. Uses the implementation without
    // scratch, as the thread may hold the other one's lock.
    const PolicyScope scope(only("relu", "vendor.guest_plain"));
    Status refused;
    do {
      refused = call();
      std::this_thread::yield();
    } while (refused.ok() && !withdrawn);
    for (int i = 0; i < 20 && !withdrawn; ++i) {
      refused = call();
      std::this_thread::yield();
    }
    EXPECT_FALSE(withdrawn) << "a thread was inside " << event;
    expect_refusal(refused);
    stage.let_go();
    inside.join();
    withdrawing.join();
    EXPECT_OK(status);
    EXPECT_LT(stage.place("let go"), stage.place("quiesce")) << stage.all();
    EXPECT_TRUE(stage.heard("quiesce")) << stage.all();
  }

  static constexpr int kElements = 16;
  alignas(256) float in_memory[kElements] = {0,  1, -2,  3,  -4,  5,  -6,  7,
                                             -8, 9, -10, 11, -12, 13, -14, 15};
  alignas(256) float out_memory[kElements] = {};
  Stage& stage = Stage::now();
  Device device;
  Tensor in, out;
  te_fl_relu_args args;
};

TEST_F(Withdrawal, TheGuestRuns) {
  ASSERT_OK(call());
  expect_right();
  EXPECT_EQ(stage.count("guest runs"), 1);
  EXPECT_EQ(stage.count("guest plans"), 1);
}

TEST_F(Withdrawal, WaitsForAnotherPluginsOp) {
  ASSERT_OK(call());  // creates scratch and plan
  Status status;
  expect_withdrawal_waits("guest runs", [&] { status = call(); });
  EXPECT_OK(status) << "a call that had begun ends as if nothing were: " << status.to_string();
  expect_right();
  // The scratch is freed after the op and not during it.
  EXPECT_LT(stage.place("let go"), stage.place("free")) << stage.all();
  EXPECT_EQ(info("owner").state, State::kDeactivated);
  EXPECT_TRUE(stage.heard("destroy")) << stage.all();
}

TEST_F(Withdrawal, WaitsForAQuestionToTheDevice) {
  ASSERT_OK(call());
  expect_withdrawal_waits("is_capturing", [&] { (void)call(); });
  EXPECT_TRUE(stage.heard("destroy")) << stage.all();
}

TEST_F(Withdrawal, WaitsForQuestionsUnderValidate) {
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  int stream = 0;
  ASSERT_OK(call(&stream));
  expect_withdrawal_waits("check_pointer", [&] { (void)call(&stream); });
}

TEST_F(Withdrawal, WaitsForEveryFunctionOfTheDevice) {
  const std::pair<const char*, std::function<void()>> functions[] = {
      {"allocate", [&] { devices::free(device, devices::allocate(device, 64).value()); }},
      {"allocate_pinned",
       [&] { devices::free_pinned(device, devices::allocate_pinned(device, 64).value()); }},
      {"copy", [&] { (void)devices::copy(device, out_memory, Device{}, in_memory, 4); }},
      {"fill", [&] { (void)devices::fill(device, out_memory, 0, 4); }},
      {"synchronize", [&] { (void)devices::synchronize(device); }},
      {"create_stream", [&] { (void)Stream::create(device); }},
      {"create_event", [&] { (void)Event::create(device); }},
      {"properties", [&] { (void)devices::properties(device); }},
      {"is_capturing", [&] { (void)devices::is_capturing(device); }},
      {"record_event", [&] { (void)devices::record_event(device, out_memory); }},
      {"wait_event", [&] { (void)devices::wait_event(device, out_memory); }},
      {"synchronize_event", [&] { (void)devices::synchronize_event(device, out_memory); }},
  };
  for (const auto& [event, enter] : functions) {
    expect_withdrawal_waits(event, enter);
    EXPECT_TRUE(stage.heard("destroy")) << event << ": " << stage.all();
    stage.reset();
    load("owner");
    ASSERT_OK(call()) << event;
  }
}

TEST_F(Withdrawal, WaitsForWhatGivesObjectsBack) {
  auto memory = std::make_unique<Tensor>(Tensor::zeros({4}, DType::kF32, device).value());
  expect_withdrawal_waits("free", [&] { memory.reset(); });
  load("owner");
  stage.reset();
  auto stream = std::make_unique<Stream>(Stream::create(device).value());
  expect_withdrawal_waits("destroy_stream", [&] { stream.reset(); });
  load("owner");
  stage.reset();
  auto event = std::make_unique<Event>(Event::create(device).value());
  expect_withdrawal_waits("destroy_event", [&] { event.reset(); });
}

TEST_F(Withdrawal, CachedRoutesHandlesAndPlansRefuse) {
  OpManager& manager = OpManager::instance();
  const auto handle = manager.prepare(op::relu, &args);
  ASSERT_OK(handle);
  for (const char* impl : {"vendor.guest", "vendor.guest_plain"}) {
    const PolicyScope scope(only("relu", impl));
    for (int i = 0; i < 3; ++i) {
      ASSERT_OK(call());
      ASSERT_OK(handle->call(&args));
    }
  }
  ASSERT_OK(plugins::deactivate("owner", true));
  EXPECT_FALSE(in_maps(fault_path("owner")));
  stage.reset();
  for (const char* impl : {"vendor.guest", "vendor.guest_plain"}) {
    const PolicyScope scope(only("relu", impl));
    expect_refusal(call());
    expect_refusal(handle->call(&args));
    std::thread([&] { expect_refusal(call()); }).join();
  }
  int stream = 0;
  expect_refusal(call(&stream));
  expect_refusal(manager.first_choice(op::relu, &args).status());
  expect_refusal(manager.resolve(op::relu, &args).status());
  expect_refusal(manager.prepare(op::relu, &args).status());
  expect_refusal(manager.saved_bytes(op::relu, &args).status());
  EXPECT_EQ(stage.all(), "") << "nothing was entered";
  expect_host_works();
}

TEST_F(Withdrawal, ARestoredDeviceRunsWithNewPlans) {
  ASSERT_OK(call());
  ASSERT_OK(plugins::deactivate("owner", true));
  // A plan may refer to the device, so it is destroyed before the device and after its work has
  // ended.
  EXPECT_LT(stage.place("quiesce"), stage.place("guest drops a plan")) << stage.all();
  EXPECT_LT(stage.place("guest drops a plan"), stage.place("destroy")) << stage.all();
  EXPECT_EQ(stage.count("guest drops a plan"), 1) << stage.all();
  load("owner");
  stage.reset();
  ASSERT_OK(call());
  expect_right();
  EXPECT_EQ(stage.count("guest plans"), 1) << "the old one was of another device";
}

TEST_F(Withdrawal, ObjectsCanBeSavedAndNothingElse) {
  const Stream stream = Stream::create(device).value();
  Tensor kept = floats({1, 2}, device);
  ASSERT_OK(plugins::deactivate("owner"));
  EXPECT_EQ(info("owner").state, State::kRetired);
  EXPECT_EQ(values_of(kept), (std::vector<float>{1, 2}));
  expect_refusal(call_relu(kept, kept));
  expect_refusal(call(stream.get()));
  EXPECT_FALSE(Stream::create(device).ok());
  EXPECT_FALSE(Tensor::zeros({2}, DType::kF32, device).ok());
}

TEST_F(Withdrawal, AGraphIsNotLaunchedAnyMore) {
  Graph graph;
  const Stream stream = Stream::create(device).value();
  {
    Capture capture = Capture::begin(device, stream.get()).value();
    graph = capture.end().value();
  }
  ASSERT_OK(graph.launch());
  ASSERT_OK(plugins::deactivate("owner"));
  stage.reset();
  const Status refused = graph.launch();
  EXPECT_FAILS(refused, kUnsupported, "ext:owner:0");
  EXPECT_FALSE(stage.heard("launch_graph")) << stage.all();
  graph = Graph();
}

TEST_F(Withdrawal, TheGuestMayGoFirst) {
  ASSERT_OK(call());
  stage.stop_at("guest runs");
  Status status;
  std::thread inside([&] { status = call(); });
  stage.wait_until_stopped();
  std::atomic<bool> gone{false};
  std::thread withdrawing([&] {
    EXPECT_OK(plugins::deactivate("guest", true));
    gone = true;
  });
  // Meanwhile, calls of other threads run in host implementations.
  while (!gone && !owned_by("guest").empty()) std::this_thread::yield();
  EXPECT_FALSE(gone);
  stage.let_go();
  inside.join();
  withdrawing.join();
  EXPECT_OK(status);
  EXPECT_LT(stage.place("let go"), stage.place("guest quiesces")) << stage.all();
}

TEST_F(Withdrawal, FromInsideAFunctionOfADeviceIsRefused) {
  Status inside;
  stage.act_at("synchronize", [&] { inside = plugins::deactivate("guest"); });
  ASSERT_OK(devices::synchronize(device));
  EXPECT_EQ(inside.code(), StatusCode::kBusy) << inside.to_string();
  EXPECT_EQ(info("guest").state, State::kActive);
}

// ---- exceptions, which rule R5 forbids

TEST_F(Withdrawal, AnExceptionOfAQuestionFailsTheCall) {
  const auto handle = OpManager::instance().prepare(op::relu, &args);
  ASSERT_OK(handle);
  ASSERT_OK(handle->call(&args));
  stage.reset();
  stage.throw_at("is_capturing");
  for (const Status& failed : {call(), handle->call(&args), devices::is_capturing(device).status(),
                               OpManager::instance().resolve(op::relu, &args).status()}) {
    EXPECT_FAILS(failed, kInternal, "thrown in is_capturing");
    EXPECT_HAS(failed.to_string(), "R5");
  }
  EXPECT_FALSE(stage.heard("guest runs"));
  stage.throw_at("");
  EXPECT_OK(call());
}

TEST_F(Withdrawal, ExceptionsUnderValidateFailTheCall) {
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  int stream = 0;
  ASSERT_OK(call(&stream));
  for (const char* function : {"check_pointer", "check_stream"}) {
    stage.reset();
    stage.throw_at(function);
    const Status failed = call(&stream);
    EXPECT_FALSE(failed.ok()) << function;
    EXPECT_HAS(failed.to_string(), std::string("thrown in ") + function);
    EXPECT_FALSE(stage.heard("guest runs")) << function;
  }
  stage.throw_at("");
  EXPECT_OK(call(&stream));
}

TEST_F(Withdrawal, ExceptionsOfEveryOtherFunctionAreErrors) {
  const auto fails = [&](const char* function, const std::function<Status()>& f) {
    stage.throw_at(function);
    const Status failed = f();
    stage.throw_at("");
    EXPECT_FAILS(failed, kInternal, std::string("thrown in ") + function);
  };
  int event = 0, stream = 0;
  fails("allocate", [&] { return devices::allocate(device, 64).status(); });
  fails("allocate_pinned", [&] { return devices::allocate_pinned(device, 64).status(); });
  fails("copy", [&] { return devices::copy(device, out_memory, Device{}, in_memory, 4); });
  fails("fill", [&] { return devices::fill(device, out_memory, 0, 4); });
  fails("synchronize", [&] { return devices::synchronize(device); });
  fails("create_stream", [&] { return devices::create_stream(device).status(); });
  fails("create_event", [&] { return devices::create_event(device).status(); });
  fails("record_event", [&] { return devices::record_event(device, &event); });
  fails("wait_event", [&] { return devices::wait_event(device, &event); });
  fails("synchronize_event", [&] { return devices::synchronize_event(device, &event); });
  fails("properties", [&] { return devices::properties(device).status(); });
  fails("begin_capture", [&] { return Capture::begin(device, &stream).status(); });
  fails("end_capture", [&] { return Capture::begin(device, &stream)->end().status(); });
  Graph graph = Capture::begin(device, &stream)->end().value();
  fails("launch_graph", [&] { return graph.launch(); });
  // Functions that release something have no caller to report to, so the error is logged.
  for (const char* function :
       {"free", "free_pinned", "destroy_stream", "destroy_event", "destroy_graph"}) {
    void* const memory = devices::allocate(device, 64).value();
    void* const pinned = devices::allocate_pinned(device, 64).value();
    void* const made_stream = devices::create_stream(device).value();
    void* const made_event = devices::create_event(device).value();
    Graph other = Capture::begin(device, &stream)->end().value();
    stage.throw_at(function);
    devices::free(device, memory);
    devices::free_pinned(device, pinned);
    devices::destroy_stream(device, made_stream);
    devices::destroy_event(device, made_event);
    other = Graph();
    EXPECT_TRUE(stage.heard(function)) << function;
    stage.throw_at("");
  }
  graph = Graph();
  EXPECT_EQ(devices::live_objects(device), 0);
}

}  // namespace
}  // namespace te_fl::test
