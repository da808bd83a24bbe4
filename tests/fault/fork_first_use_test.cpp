// A forked child must not wait for a static object that another thread of the parent was
// initialising at the fork. One thread uses te-fl for the first time, and the process forks while
// that thread initialises the first function-local static object; a new process repeats this for
// the second object, and so on. The program replaces the C++ library's guard functions for such
// objects, so it knows which object is being initialised and which one a child waits for.
#include <gtest/gtest.h>

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>

#include "fault_fixture.hpp"

namespace {

using Guard = __cxxabiv1::__guard;

enum Outcome : int { kFine, kWrong, kWaits, kHangs, kNoMore };

thread_local bool t_first = false;  // true in the thread that uses te-fl first
std::atomic<bool> g_inside{false}, g_forking{false}, g_forked{false};
bool g_child = false;
int g_chosen = 0, g_begun = 0;
pid_t g_forking_thread = 0;
// Objects that the first thread is initialising, innermost last.
std::array<std::atomic<Guard*>, 32> g_making;
std::atomic<size_t> g_depth{0};

template <class F>
F* real(std::atomic<F*>& kept, const char* name) {
  if (kept.load() == nullptr) kept.store(reinterpret_cast<F*>(dlsym(RTLD_NEXT, name)));
  return kept.load();
}

// Returns true if fork() itself waits for a lock that the thread holds that uses te-fl first.
bool fork_waits() {
  char path[64], text[512];
  std::snprintf(path, sizeof path, "/proc/self/task/%d/stat", g_forking_thread);
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  const ssize_t size = read(file, text, sizeof text - 1);
  close(file);
  text[size > 0 ? size : 0] = '\0';
  const char* const state = std::strrchr(text, ')');
  return state != nullptr && state[1] == ' ' && state[2] == 'S';
}

void begun(Guard* guard) {
  g_making.at(g_depth).store(guard);
  ++g_depth;
  if (++g_begun != g_chosen) return;
  g_inside = true;
  while (!g_forking) sched_yield();
  while (!g_forked && !fork_waits()) sched_yield();
}

void ended() { --g_depth; }

[[noreturn]] void print_stack_and_exit(Outcome outcome) {
  std::array<void*, 24> frames{};
  backtrace_symbols_fd(frames.data(), backtrace(frames.data(), 24), STDOUT_FILENO);
  _exit(outcome);
}

// Reports that the child would wait forever for the static object of this guard, and ends the
// child.
[[noreturn]] void report_wait(Guard* guard) {
  Dl_info where{};
  dladdr(guard, &where);
  dprintf(
      STDOUT_FILENO, "the child waits for a static object of %s, its guard at offset 0x%zx, in:\n",
      where.dli_fname,
      static_cast<size_t>(reinterpret_cast<char*>(guard) - static_cast<char*>(where.dli_fbase)));
  print_stack_and_exit(kWaits);
}

void report_hang(int) { print_stack_and_exit(kHangs); }

}  // namespace

namespace __cxxabiv1 {

extern "C" int __cxa_guard_acquire(__guard* guard) {
  static constinit std::atomic<int (*)(__guard*)> kept{nullptr};
  for (size_t i = 0; g_child && i < g_depth; ++i) {
    if (g_making.at(i) == guard) report_wait(guard);
  }
  const int mine = real(kept, "__cxa_guard_acquire")(guard);
  if (mine != 0 && t_first) begun(guard);
  return mine;
}
extern "C" void __cxa_guard_release(__guard* guard) noexcept {
  static constinit std::atomic<void (*)(__guard*)> kept{nullptr};
  real(kept, "__cxa_guard_release")(guard);
  if (t_first) ended();
}
extern "C" void __cxa_guard_abort(__guard* guard) noexcept {
  static constinit std::atomic<void (*)(__guard*)> kept{nullptr};
  real(kept, "__cxa_guard_abort")(guard);
  if (t_first) ended();
}

}  // namespace __cxxabiv1

namespace te_fl::test {
namespace {

// Returns true if the result is right. A child may lack plugins that the parent had not loaded at
// the fork, but it has the built-in backends.
bool right(const Status& status, const Tensor& out) {
  return status.ok() && values_of(out) == std::vector<float>{0, 2, 0, 4};
}

// Uses most parts of te-fl; returns false if a result is wrong.
bool use() {
  log::write(log::Level::kInfo, "a fork comes");
  (void)environment::table();
  PolicySettings settings;
  settings.prefer = Kind::kReference;
  settings.deny_vendors = {"nobody"};
  const PolicyScope scope(settings);
  (void)current_policy();
  (void)devices::list();
  const Tensor in = floats({-1, 2, -3, 4}), out = floats({9, 9, 9, 9});
  te_fl_relu_args args;
  args.input = in;
  args.output = out;
  bool all = right(call_relu(in, out), out);
  (void)plugins::load(fault_path("good"));
  all = right(call_relu(in, out), out) && all;
  (void)OpManager::instance().resolve(op::relu, &args);
  if (auto handle = OpManager::instance().prepare(op::relu, &args); handle.ok())
    all = right(handle->call(&args), out) && all;
  (void)OpManager::instance().usage();
  (void)plugins::list();
  (void)plugins::deactivate("good", true);
  OpRegistry registry;
  OpManager manager(registry);
  (void)manager.call(op::relu, &args);
  all = Status().message().empty() && all;
  std::thread([&] { all = right(call_relu(in, out), out) && all; }).join();
  return all;
}

int wait_for_outcome(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : int{kHangs};
}

// Runs in a process that has not used te-fl yet: forks while static object number `nth` is
// initialised.
int fork_during_creation(int nth) {
  dup2(open("/dev/null", O_WRONLY), STDERR_FILENO);
  log::set_level(log::Level::kTrace);
  g_chosen = nth;
  g_forking_thread = gettid();
  std::atomic<bool> ended{false}, good{true};
  std::thread first([&] {
    t_first = true;
    good = use();
    t_first = false;
    ended = true;
  });
  while (!g_inside && !ended) sched_yield();
  if (!g_inside) {
    first.join();
    return good ? kNoMore : kWrong;
  }
  g_forking = true;
  const pid_t child = fork();
  if (child == 0) {
    g_child = true;
    signal(SIGALRM, &report_hang);
    alarm(30);
    _exit(use() ? kFine : kWrong);
  }
  g_forked = true;
  first.join();
  const int outcome = wait_for_outcome(child);
  return good ? outcome : kWrong;
}

TEST(ForkAtFirstUse, NoChildWaitsForWhatAnotherThreadWasMaking) {
  const TempFolder folder;
  setenv("TE_FL_VERIFY", "1", 1);
  setenv("TE_FL_TRACE", (folder / "trace.json").c_str(), 1);
  int nth = 1;
  for (int outcome = kFine; outcome != kNoMore; ++nth) {
    const pid_t world = fork();
    if (world == 0) _exit(fork_during_creation(nth));
    outcome = wait_for_outcome(world);
    EXPECT_TRUE(outcome == kFine || outcome == kNoMore)
        << "static object " << nth << ": " << outcome;
  }
  EXPECT_GT(nth, 5) << "the objects of te-fl are counted";
}

}  // namespace
}  // namespace te_fl::test
