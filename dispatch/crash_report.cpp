#include "dispatch/crash_report.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "core/base/job_rank.hpp"
#include "registry/arguments.hpp"
#include "registry/thread_record.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/environment.hpp"

// The handler calls only async-signal-safe functions and te-fl's functions that neither allocate
// nor wait for a lock.
namespace te_fl::dispatch {
namespace {

using registry::EnteredFunction;
using registry::Implementation;
using registry::ThreadRecord;

struct Watched {
  int signal;
  const char* name;
};
constexpr std::array<Watched, 5> kWatched = {{{SIGSEGV, "SIGSEGV"},
                                              {SIGBUS, "SIGBUS"},
                                              {SIGILL, "SIGILL"},
                                              {SIGFPE, "SIGFPE"},
                                              {SIGABRT, "SIGABRT"}}};

// The actions before te-fl's, in the order of kWatched.
std::array<struct sigaction, kWatched.size()> g_previous;
std::atomic<bool> g_on{false};
std::atomic<bool> g_installed{false};
std::atomic<int> g_rank{-1};

// The progress of the process's report.
enum Report : int { kNone, kBeingWritten, kWritten };
std::atomic<int> g_report{kNone};

// The place to which the handler returns if it faults while it reads arguments; null: it does not
// read them.
constinit thread_local sigjmp_buf* t_escape [[gnu::tls_model("initial-exec")]] = nullptr;

// A line of text that grows without allocation. What does not fit is left out.
class Line {
 public:
  void add(std::string_view text) noexcept {
    // Control characters in names would break the line.
    for (const char c : text.substr(0, kRoom - std::min(size_, kRoom))) {
      text_[size_++] = static_cast<unsigned char>(c) < ' ' ? ' ' : c;
    }
  }
  void add(int64_t number) noexcept {
    if (number < 0) add("-");
    add_digits(number < 0 ? 0 - static_cast<uint64_t>(number) : static_cast<uint64_t>(number), 10);
  }
  void add_address(const void* address) noexcept {
    add("0x");
    add_digits(reinterpret_cast<uintptr_t>(address), 16);
  }
  // Ends the line and writes it by one call, so that lines of several processes do not mix.
  void write_to_stderr() noexcept {
    text_[size_++] = '\n';
    while (::write(STDERR_FILENO, text_, size_) < 0 && errno == EINTR) {
    }
  }

 private:
  static constexpr size_t kRoom = 1500;
  void add_digits(uint64_t number, uint64_t base) noexcept {
    char digits[20];
    size_t first = sizeof digits;
    do {
      digits[--first] = "0123456789abcdef"[number % base];
      number /= base;
    } while (number != 0);
    add(std::string_view(digits + first, sizeof digits - first));
  }
  char text_[kRoom + 1];
  size_t size_ = 0;
};

void add_tensor(Line& line, const te_fl_tensor* tensor) noexcept {
  const te_fl_dltensor& dl = tensor->dl;
  const int index = dtype_index(dl.dtype);
  line.add(index == kInvalidDType ? std::string_view("?") : name(static_cast<DType>(index)));
  line.add("[");
  if (dl.ndim >= 0 && dl.ndim <= kMaxRank && (dl.ndim == 0 || dl.shape != nullptr)) {
    for (int i = 0; i < dl.ndim; ++i) {
      if (i > 0) line.add(",");
      line.add(dl.shape[i]);
    }
  } else {
    line.add("rank ");
    line.add(int64_t{dl.ndim});
  }
  line.add("]");
  if (dl.strides != nullptr) line.add(" strided");
  if (dl.data != nullptr) {
    line.add(" at ");
    line.add_address(static_cast<const char*>(dl.data) + dl.byte_offset);
  }
}

void add_arguments(Line& line, const te_fl_op_schema& schema, const void* args) noexcept {
  bool first = true;
  const auto begin = [&](const char* argument) {
    line.add(first ? ", with " : ", ");
    line.add(argument);
    line.add(" ");
    first = false;
  };
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    if (arg.type == TE_FL_ARG_TENSOR) {
      const te_fl_tensor* tensor = registry::tensor_argument(arg, args);
      if (tensor == nullptr) continue;
      begin(arg.name);
      add_tensor(line, tensor);
    } else if (arg.type == TE_FL_ARG_TENSOR_LIST) {
      const registry::TensorList list = registry::list_argument(arg, args);
      if (list.count == 0) continue;
      begin(arg.name);
      line.add("(");
      line.add(list.count);
      line.add(")");
    }
  }
}

// Calls f. Returns false if f was ended by a fault.
template <class F>
bool guarded(F&& f) noexcept {
  sigjmp_buf escape;
  if (sigsetjmp(escape, 0) != 0) {
    t_escape = nullptr;
    return false;
  }
  t_escape = &escape;
  f();
  t_escape = nullptr;
  return true;
}

// The innermost function of an implementation that the thread is inside; null: none.
const EnteredFunction* innermost(const ThreadRecord& thread) noexcept {
  const uint32_t depth = std::min(thread.slot.depth, ThreadRecord::kEnteredDepth);
  for (uint32_t i = depth; i > 0; --i) {
    if (thread.entered[i - 1].impl.load(std::memory_order_relaxed) != nullptr)
      return &thread.entered[i - 1];
  }
  return nullptr;
}

void add_function(Line& line, const EnteredFunction& function) noexcept {
  const Implementation* impl = function.impl.load(std::memory_order_relaxed);
  const char* entry = function.name.load(std::memory_order_relaxed);
  if (impl == nullptr) return;  // of another thread, which has left it
  line.add(entry == nullptr ? "run()" : entry);
  line.add(" of '");
  line.add(impl->interned_id);
  line.add("' (plugin ");
  line.add(impl->owner);
  line.add("), op '");
  line.add(impl->interned_op);
  line.add("'");
}

struct OtherThreads {
  Line* line;
  int found;
};

// Adds the functions that other threads are inside: a plugin may have threads of its own, which
// work for them. Returns false if there are none.
bool add_other_threads(Line& line) noexcept {
  constexpr int kMost = 3;
  OtherThreads others{&line, 0};
  registry::for_each_visible_thread(
      [](const ThreadRecord& thread, void* context) {
        auto& o = *static_cast<OtherThreads*>(context);
        const EnteredFunction* function = innermost(thread);
        if (function == nullptr || o.found == kMost) return;
        o.line->add(o.found++ == 0 ? " on a thread that runs no op; other threads are inside "
                                   : "; ");
        add_function(*o.line, *function);
      },
      &others);
  return others.found > 0;
}

void add_signal(Line& line, const Watched& watched, const siginfo_t* info) noexcept {
  line.add(watched.name);
  if (info->si_code == SI_USER && info->si_pid != getpid()) {
    line.add(" from process ");
    line.add(int64_t{info->si_pid});
  } else if (info->si_code > 0 && watched.signal != SIGABRT) {
    line.add(watched.signal == SIGSEGV || watched.signal == SIGBUS ? " at address "
                                                                   : " of the instruction at ");
    line.add_address(info->si_addr);
  }
}

// Composes the report. Returns false if no implementation is concerned.
bool compose(Line& line, const Watched& watched, const siginfo_t* info) noexcept {
  line.add("te-fl error: ");
  if (const int rank = g_rank.load(std::memory_order_relaxed); rank >= 0) {
    line.add("rank ");
    line.add(int64_t{rank});
    line.add(": ");
  }
  add_signal(line, watched, info);
  bool concerned = false;
  const ThreadRecord* thread = registry::t_record;
  const EnteredFunction* function = thread == nullptr ? nullptr : innermost(*thread);
  if (function != nullptr) {
    concerned = true;
    line.add(" in ");
    const bool readable = guarded([&] {
      add_function(line, *function);
      add_arguments(line, *function->impl.load(std::memory_order_relaxed)->desc.schema,
                    function->args.load(std::memory_order_relaxed));
    });
    if (!readable) line.add("; the rest cannot be read");
  } else {
    guarded([&] { concerned = add_other_threads(line); });
  }
  line.add("; thread ");
  line.add(static_cast<int64_t>(syscall(SYS_gettid)));
  line.add("; process ");
  line.add(int64_t{getpid()});
  line.add("; the signal is passed on (TE_FL_CRASH_REPORT=0 leaves this line out)");
  return concerned;
}

// Writes the report, once in a process. A thread that crashes while another one writes waits for
// the end of the line, because passing on its signal may end the process.
void report(const Watched& watched, const siginfo_t* info) noexcept {
  int none = kNone;
  if (!g_report.compare_exchange_strong(none, kBeingWritten)) {
    constexpr timespec kPause{0, 1'000'000};
    for (int i = 0; i < 1000 && g_report.load() == kBeingWritten; ++i) nanosleep(&kPause, nullptr);
    return;
  }
  Line line;
  const bool concerned = compose(line, watched, info);
  if (concerned) line.write_to_stderr();
  g_report.store(concerned ? kWritten : kNone);
}

// Restores the action before te-fl's. A fault of the thread's own instruction occurs again when the
// handler returns. Any other signal is sent again, and blocked until the handler returns.
void pass_on(size_t place, siginfo_t* info) noexcept {
  const int signal = kWatched[place].signal;
  sigaction(signal, &g_previous[place], nullptr);
  const bool occurs_again = info->si_code > 0 && signal != SIGABRT &&
                            !(signal == SIGBUS && info->si_code == BUS_MCEERR_AO);
  if (occurs_again) return;
  sigset_t only;
  sigemptyset(&only);
  sigaddset(&only, signal);
  pthread_sigmask(SIG_BLOCK, &only, nullptr);
  const auto thread = static_cast<pid_t>(syscall(SYS_gettid));
  if (syscall(SYS_rt_tgsigqueueinfo, getpid(), thread, signal, info) != 0) raise(signal);
}

void handle(int signal, siginfo_t* info, void*) noexcept {
  const int error = errno;
  if (t_escape != nullptr) siglongjmp(*t_escape, 1);
  for (size_t i = 0; i < kWatched.size(); ++i) {
    if (kWatched[i].signal != signal) continue;
    if (g_on.load(std::memory_order_relaxed)) report(kWatched[i], info);
    pass_on(i, info);
  }
  errno = error;
}

void install() noexcept {
  for (size_t i = 0; i < kWatched.size(); ++i) {
    const int signal = kWatched[i].signal;
    if (sigaction(signal, nullptr, &g_previous[i]) != 0 || g_previous[i].sa_handler == SIG_IGN)
      continue;
    struct sigaction action {};
    action.sa_sigaction = &handle;
    // On the thread's alternate stack, if it has one: the ordinary stack may have overflowed.
    // SA_NODEFER lets guarded() notice a fault in the handler.
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    sigaction(signal, &action, nullptr);
  }
}

}  // namespace

void follow_crash_report_setting() {
  const Result<bool> setting = environment::get_bool("TE_FL_CRASH_REPORT");
  const bool on = !setting.ok() || *setting;
  g_rank.store(core::job_rank().value_or(-1), std::memory_order_relaxed);
  g_on.store(on, std::memory_order_relaxed);
  // Only the first thread that gets here installs the handlers.
  if (on && !g_installed.exchange(true)) install();
}

}  // namespace te_fl::dispatch
