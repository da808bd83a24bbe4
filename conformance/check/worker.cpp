// The child process of te-fl check: opens the plugin and runs its ops, and announces each step
// before it is made.
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <link.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "conformance/check/choice.hpp"
#include "conformance/check/output.hpp"
#include "conformance/check/steps.hpp"
#include "conformance/device_mirror.hpp"
#include "conformance/guarded.hpp"

namespace te_fl_tool::check {
namespace {

namespace conformance = te_fl::conformance;
using nlohmann::json;
using te_fl::Device;
using te_fl::Status;

constexpr int kOrders = 3, kAnswers = 4;  // descriptors of the pipes from and to the parent
constexpr int kStepsOfCase = 6;           // result, guard twice, determinism, stream, describe

void say(const json& message) {
  const std::string line = json_text(message, -1) + "\n";
  for (size_t at = 0; at < line.size();) {
    const ssize_t n = write(kAnswers, line.data() + at, line.size() - at);
    if (n <= 0) _exit(1);  // the parent has ended
    at += static_cast<size_t>(n);
  }
}

// The plugin's code for last_words(): the address range [begin, end), and the address that
// corresponds to offset 0 of the file.
std::atomic<uintptr_t> g_code_begin{0}, g_code_end{0}, g_code_base{0};

// The address of the instruction that caused the signal; 0 if unknown.
uintptr_t instruction_pointer([[maybe_unused]] const void* context) {
#if defined(__x86_64__)
  return static_cast<uintptr_t>(
      static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
  return static_cast<const ucontext_t*>(context)->uc_mcontext.pc;
#else
  return 0;
#endif
}

// Reports the offset in the plugin's code where the signal occurred, or from which the failing
// function was called.
void say_where(const void* context) {
  const uintptr_t instruction = instruction_pointer(context);
  void* frames[64];
  const int count = backtrace(frames, 64);
  for (int i = 0; i < count; ++i) {
    const auto at = reinterpret_cast<uintptr_t>(frames[i]);
    if (at < g_code_begin || at >= g_code_end) continue;
    char text[80];
    const int n =
        std::snprintf(text, sizeof text, "{\"crash_offset\": %zu}\n",
                      // A return address may be in the next function.
                      static_cast<size_t>(at - g_code_base - (at == instruction ? 0 : 1)));
    if (write(kAnswers, text, static_cast<size_t>(n)) < 0) _exit(1);
    return;
  }
}

// Signal handler: reports the signal and the accessed memory, and then lets the process end.
void last_words(int signal, siginfo_t* info, void* context) {
  char text[400], guard[160] = "";
  const bool fault = signal == SIGSEGV || signal == SIGBUS;
  const bool device = fault && conformance::is_mirrored(info->si_addr);
  const bool behind = fault && conformance::explain_fault(info->si_addr, guard, sizeof guard);
  const int n =
      fault ? std::snprintf(text, sizeof text, "{\"crash\": \"SIG%s at address %p%s%s%s\"}\n",
                            sigabbrev_np(signal), info->si_addr, behind ? ", " : "", guard,
                            behind   ? ": an op reads and writes its arguments only (rule R11)"
                            : device ? ", which is memory of the device: the host may not "
                                       "read or write it (rule R11)"
                                     : "")
            : std::snprintf(text, sizeof text, "{\"crash\": \"SIG%s\"}\n", sigabbrev_np(signal));
  if (write(kAnswers, text, static_cast<size_t>(n)) < 0) _exit(1);
  std::signal(signal, SIG_DFL);
  alarm(5);  // unwinding a corrupt stack may not terminate
  say_where(context);
  raise(signal);
}

void catch_signals() {
  void* frame;
  backtrace(&frame, 1);  // loads libgcc in advance
  static char stack[64 << 10];
  const stack_t alternate{stack, 0, sizeof stack};
  sigaltstack(&alternate, nullptr);
  struct sigaction action {};
  action.sa_sigaction = last_words;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESETHAND;
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT})
    sigaction(signal, &action, nullptr);
}

// The implementations of a plugin, on each device that they support.
std::vector<Target> list_targets(const te_fl::plugins::PluginInfo& plugin,
                                 const conformance::Table& table) {
  std::map<std::string, std::string> family;
  for (const auto& c : table) family[c.op] = c.family;
  std::vector<Target> targets;
  for (const auto& impl : te_fl::OpRegistry::instance().snapshot()) {
    const std::string entry = impl.op + ": " + impl.impl_id;
    if (std::find(plugin.ops.begin(), plugin.ops.end(), entry) == plugin.ops.end()) continue;
    Target target{.op = impl.op, .impl = impl.impl_id};
    if (const auto found = family.find(impl.op); found != family.end())
      target.family = found->second;
    std::set<int32_t> types;
    for (const Device& device : te_fl::devices::list()) {
      if ((impl.desc.device_types >> device.type & 1) == 0) continue;
      const bool ours = device.type != TE_FL_DEVICE_EXT || impl.desc.provider == nullptr ||
                        te_fl::devices::intern_provider(impl.desc.provider) == device.provider;
      if (!ours) continue;
      target.device = te_fl::to_string(device);
      target.first = types.insert(device.type).second;
      targets.push_back(target);
    }
    if (types.empty()) targets.push_back(target);
  }
  return targets;
}

json describe_device(const std::string& device) {
  json facts = {{"name", device}, {"chip", ""}, {"driver", ""}};
  const auto parsed = te_fl::parse_device(device);
  if (!parsed.ok()) return facts;
  if (const auto props = te_fl::devices::properties(*parsed); props.ok())
    facts["chip"] = props->name, facts["driver"] = props->driver;
  return facts;
}

// Loads the plugin. `state` receives the process state before any code of the plugin ran, so that
// changes by the plugin are detected.
te_fl::Result<te_fl::plugins::PluginInfo> open_plugin(const CheckOptions& options,
                                                      ProcessState& state) {
  state = ProcessState::now();
  te_fl::OpManager::instance();
  te_fl::plugins::take_status_misuse();  // drops the status of other installed plugins
  te_fl::plugins::take_undeclared_setting();
  if (options.builtin.empty()) {
    // Records the process state with the changes that other installed plugins have made.
    const ProcessState with_others = ProcessState::now();
    auto loaded = te_fl::plugins::load(options.plugin);
    if (loaded.ok()) state = with_others;
    const te_fl::StatusCode code = loaded.status().code();
    if (code != te_fl::StatusCode::kAlreadyExists && code != te_fl::StatusCode::kIncompatible)
      return loaded;
    // An installed plugin with the same name, or with the same devices, may have been loaded first.
    bool others = false;
    for (const auto& other : te_fl::plugins::list()) {
      if (other.origin == "built-in" || other.state != te_fl::plugins::State::kActive) continue;
      TE_FL_RETURN_IF_ERROR(te_fl::plugins::deactivate(other.name));
      others = true;
    }
    return others ? te_fl::plugins::load(options.plugin) : loaded;
  }
  std::string known;
  for (const auto& plugin : te_fl::plugins::list()) {
    if (plugin.origin != "built-in") continue;
    if (plugin.name == options.builtin) return plugin;
    known += (known.empty() ? "" : ", ") + plugin.name;
  }
  return te_fl::not_found("--builtin " + options.builtin + ": the built-in backends are " + known);
}

class Worker {
 public:
  explicit Worker(const CheckOptions& options) : options_(options) {}

  int serve() {
    table_ = conformance::all_cases();
    say({{"begin", 0}, {"resume", -1}, {"check", "load"}, {"case", ""}});
    const auto plugin = open_plugin(options_, environment_);
    if (!plugin.ok()) {
      const auto known = te_fl::plugins::list();
      const bool unknown = plugin.status().code() == te_fl::StatusCode::kNotFound &&
                           options_.plugin.find('/') == std::string::npos &&
                           std::none_of(known.begin(), known.end(), [&](const auto& other) {
                             return other.name == options_.plugin && other.origin != "built-in";
                           });
      say({{"failed", unknown ? plugin.status().message() : plugin.status().to_string()},
           {"unknown", unknown}});
      return 1;
    }
    plugin_ = *plugin;
    json targets = json::array();
    for (const Target& t : list_targets(plugin_, table_))
      targets.push_back({{"op", t.op},
                         {"impl", t.impl},
                         {"device", t.device},
                         {"family", t.family},
                         {"first", t.first}});
    json devices = json::array();
    for (const std::string& device : plugin_.devices) devices.push_back(describe_device(device));
    say({{"hello",
          {{"name", plugin_.name},
           {"vendor", plugin_.vendor},
           {"version", plugin_.version},
           {"build_id", plugin_.build_id},
           {"path", plugin_.path},
           {"devices", devices},
           {"code", note_code_digest(plugin_)},
           {"targets", targets},
           {"status", te_fl::plugins::take_status_misuse()},
           {"setting", te_fl::plugins::take_undeclared_setting()},
           {"changed", environment_.changed()}}}});
    printed_.take();  // drops what was printed during loading
    std::string line;
    while (next_order(line)) {
      const json order = json::parse(line);
      if (order.contains("lifecycle"))
        lifecycle(order);
      else if (order.contains("device_section"))
        device(order);
      else
        target(order);
      say({{"done", true}});
    }
    return 0;
  }

 private:
  static bool next_order(std::string& line) {
    line.clear();
    for (char c = 0; read(kOrders, &c, 1) == 1;) {
      if (c == '\n') return true;
      line += c;
    }
    return false;
  }

  // Steps are numbered: kStepsOfCase for each case, then the extra steps, then one for each sweep
  // case. Steps before order["from"] are complete.
  void target(const json& order) {
    Subject subject;
    subject.op = order.at("op"), subject.impl = order.at("impl");
    subject.device_name = order.at("device");
    subject.device = te_fl::parse_device(subject.device_name).value();
    for (const auto& impl : te_fl::OpRegistry::instance().snapshot())
      if (impl.op == subject.op && impl.impl_id == subject.impl)
        subject.flags = impl.desc.flags, subject.describes = impl.desc.describe != nullptr;
    const int from = order.at("from");
    conformance::Table cases = chosen_cases(options_, table_, subject.op);
    if (subject.device.is_host() && !options_.thorough && options_.name.empty())
      std::erase_if(cases, [](const conformance::Case& c) { return c.for_devices; });
    int step = 0;
    for (const auto& c : cases) {
      one_case(subject, c, step, from);
      step += kStepsOfCase;
    }
    for (const ExtraStep& extra : extra_steps()) {
      if (step >= from) {
        begin(step, step + 1, subject, extra.name, "");
        for (Finding& f : extra.run(subject, cases)) report(subject, std::move(f));
      }
      ++step;
    }
    for (const auto& c : chosen_sweep(options_, subject.op)) {
      if (step >= from) {
        begin(step, step + 1, subject, "sweep", c.name);
        swept(subject, c);
      }
      ++step;
    }
  }

  void swept(const Subject& subject, const conformance::Case& c) {
    constexpr size_t kMargin = 4096;  // small, since there are many small cases
    conformance::Prepared prepared(c, subject.device);
    Finding f = subject.device.is_host() || c.large ? check_result(subject, c, prepared)
                                                    : check_margins(subject, c, prepared, kMargin);
    if (f.outcome == Outcome::kPass && subject.device.is_host() && !c.large) {
      const Finding guarded = check_guard(subject, c, prepared);
      if (guarded.outcome == Outcome::kFail) f = guarded;
    }
    f.check = "sweep";
    report(subject, std::move(f));
  }

  void device(const json& order) {
    Subject subject;
    subject.device_name = order.at("device_section");
    subject.device = te_fl::parse_device(subject.device_name).value();
    const int from = order.at("from");
    int step = -1;
    std::string failed;  // the first failed step about memory
    for (const DeviceStep& s : device_steps()) {
      if (++step < from || !is_chosen_device_step(options_, s.name)) continue;
      begin(step, step + 1, subject, "device", s.name);
      Finding f =
          s.order && !failed.empty() ? not_tried(s, failed) : device_step(s, subject.device);
      if (!s.order && f.outcome == Outcome::kFail) failed = s.name;
      report(subject, std::move(f));
    }
  }

  static Finding not_tried(const DeviceStep& step, const std::string& failed) {
    Finding f;
    f.check = "device", f.name = step.name, f.outcome = Outcome::kUnsupported;
    f.message = "not tried: " + failed + " failed, without which nothing can be seen";
    return f;
  }

  static Finding device_step(const DeviceStep& step, const Device& device) {
    const auto start = std::chrono::steady_clock::now();
    const Status status = step.run(device);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    Finding f;
    f.check = "device", f.name = step.name, f.milliseconds = took.count();
    if (!status.ok()) {
      const bool lacks = status.code() == te_fl::StatusCode::kUnsupported;
      f.outcome = lacks ? Outcome::kUnsupported : Outcome::kFail;
      f.message = status.message();
    }
    return f;
  }

  void one_case(const Subject& subject, const conformance::Case& c, int step, int from) {
    if (from >= step + kStepsOfCase) return;
    if (from <= step) begin(step, step + kStepsOfCase, subject, "result", c.name);
    std::optional<conformance::Prepared> prepared;
    Finding f;
    try {
      prepared.emplace(c, subject.device);
    } catch (const std::exception& e) {
      f.check = "result", f.name = c.name, f.outcome = Outcome::kFail;
      f.message = std::string("the case cannot be built: ") + e.what();
      return report(subject, std::move(f));
    }
    if (from <= step) {
      f = check_result(subject, c, *prepared);
      const bool passed = f.outcome == Outcome::kPass;
      report(subject, f);
      if (!passed) return;
    }
    if (from <= step + 1 && !c.large && prepared->problem().want_code == 0) {
      begin(step + 1, step + 2, subject, "guard", c.name);
      report(subject, subject.device.is_host() ? check_guard(subject, c, *prepared)
                                               : check_margins(subject, c, *prepared));
    }
    if (from <= step + 2 && subject.device.is_host() && !c.large &&
        prepared->problem().want_code == 0) {
      begin(step + 2, step + 3, subject, "guard", c.name);
      report(subject, check_start_guard(subject, c, *prepared));
    }
    if (from <= step + 3 && (subject.flags & TE_FL_OP_DETERMINISTIC) != 0) {
      begin(step + 3, step + 4, subject, "determinism", c.name);
      report(subject, check_determinism(subject, c, *prepared));
    }
    if (from <= step + 4 && !subject.device.is_host()) {
      begin(step + 4, step + 5, subject, "stream", c.name);
      if (auto found = check_stream(subject, c, *prepared)) report(subject, std::move(*found));
    }
    if (from <= step + 5 && subject.describes && !c.large && prepared->problem().want_code == 0) {
      begin(step + 5, step + 6, subject, "describe", c.name);
      report(subject, check_describe(subject, c, *prepared));
    }
  }

  void begin(int step, int resume, const Subject& subject, const std::string& check,
             const std::string& name) {
    say({{"begin", step},
         {"resume", resume},
         {"check", check},
         {"op", subject.op},
         {"case", name}});
  }

  void report(const Subject& subject, Finding f) {
    f.op = subject.op, f.impl = subject.impl, f.device = subject.device_name;
    say({{"result", f}});
    report_status(f);
    report_setting(f);
    report_printed(f);
    const std::string changed = environment_.changed();
    if (changed.empty()) return;
    environment_.restore();
    f.check = "environment", f.outcome = Outcome::kFail, f.message = "rule R8: " + changed;
    say({{"result", f}});
  }

  // Reports an invalid status that the plugin returned. te-fl replaces an invalid status, so no
  // other check detects it. Reported once per implementation and check.
  void report_status(Finding f) {
    const std::string odd = te_fl::plugins::take_status_misuse();
    if (odd.empty() || !reported_.insert(f.impl + " " + f.device + " " + f.check).second) return;
    f.message = "a function of the plugin, in the check \"" + f.check + "\": " + odd;
    f.check = "status", f.outcome = Outcome::kFail;
    say({{"result", f}});
  }

  // Reports an undeclared setting, once per implementation and setting.
  void report_setting(Finding f) {
    const std::string name = te_fl::plugins::take_undeclared_setting();
    if (name.empty() || !reported_.insert(f.impl + " " + name).second) return;
    f.message = "in the check \"" + f.check + "\": " + undeclared_text(name);
    f.check = "settings", f.outcome = Outcome::kFail;
    say({{"result", f}});
  }

  // A library may print a text at its first use, so only repeated printing is reported.
  void report_printed(Finding f) {
    const std::string text = printed_.take();
    if (text.empty() || ++printing_[f.impl + " " + f.device] != 2) return;
    f.message =
        "calls in the checks of more than one case wrote to stdout or stderr, the last in \"" +
        f.check + "\": " + text + " (rule R9)";
    f.check = "printing", f.outcome = Outcome::kFail;
    say({{"result", f}});
  }

  void lifecycle(const json& order) {
    const conformance::Table none;
    std::vector<std::pair<Subject, conformance::Table>> work;
    for (const json& t : order.at("lifecycle")) {
      Subject subject;
      subject.op = t.at("op"), subject.impl = t.at("impl"), subject.device_name = t.at("device");
      work.emplace_back(subject, chosen_cases(options_, table_, subject.op));
    }
    say({{"begin", 0}, {"resume", -1}, {"check", "lifecycle"}, {"op", ""}, {"case", ""}});
    for (const Finding& f : check_structs(plugin_)) say({{"result", f}});
    for (const Finding& f : check_lifecycle(plugin_, work)) {
      say({{"result", f}});
      report_status(f);
    }
  }

  const CheckOptions& options_;
  conformance::Table table_;
  te_fl::plugins::PluginInfo plugin_;
  ProcessState environment_;
  std::set<std::string> reported_;
  PrintedText printed_;
  std::map<std::string, int> printing_;  // findings with text, by implementation and device
};

}  // namespace

std::string note_code_digest(const te_fl::plugins::PluginInfo& plugin) {
  const void* code = nullptr;
  for (const auto& impl : te_fl::OpRegistry::instance().snapshot()) {
    const std::string entry = impl.op + ": " + impl.impl_id;
    if (std::find(plugin.ops.begin(), plugin.ops.end(), entry) != plugin.ops.end())
      code = reinterpret_cast<const void*>(impl.desc.run);
  }
  for (const std::string& name : plugin.devices) {
    const auto device = te_fl::parse_device(name);
    const auto desc = device.ok() ? te_fl::devices::find(*device) : device.status();
    if (code == nullptr && desc.ok()) code = reinterpret_cast<const void*>((*desc)->api->allocate);
  }
  g_code_end = 0;
  Dl_info info{};
  if (code == nullptr || dladdr(code, &info) == 0) return {};
  const auto note = [](dl_phdr_info* library, size_t, void* address) {
    const auto at = reinterpret_cast<uintptr_t>(address);
    uintptr_t begin = UINTPTR_MAX, end = 0;
    for (int i = 0; i < library->dlpi_phnum; ++i) {
      const auto& header = library->dlpi_phdr[i];
      if (header.p_type != PT_LOAD) continue;
      begin = std::min<uintptr_t>(begin, library->dlpi_addr + header.p_vaddr);
      end = std::max<uintptr_t>(end, library->dlpi_addr + header.p_vaddr + header.p_memsz);
    }
    if (at < begin || at >= end) return 0;
    g_code_base = library->dlpi_addr, g_code_begin = begin, g_code_end = end;
    return 1;
  };
  dl_iterate_phdr(note, const_cast<void*>(code));
  return info.dli_fname;
}

bool in_plugin(uintptr_t address) {
  return g_code_end == 0 || (g_code_begin <= address && address < g_code_end);
}

void beat() {
  static std::atomic<int64_t> last{0};
  const auto now = std::chrono::duration_cast<std::chrono::seconds>(
                       std::chrono::steady_clock::now().time_since_epoch())
                       .count();
  if (last.exchange(now) == now) return;
  constexpr std::string_view kLine = "{\"alive\": true}\n";
  if (write(kAnswers, kLine.data(), kLine.size()) <= 0) _exit(1);
}

int serve_json(const std::string& text) {
  const json settings = json::parse(text);
  CheckOptions options;
  options.plugin = settings.at("plugin"), options.op = settings.at("op");
  options.family = settings.at("family"), options.impl = settings.at("impl");
  options.name = settings.at("case"), options.seed = settings.at("seed");
  options.quick = settings.at("quick"), options.thorough = settings.at("long");
  options.python = settings.at("python");
  return serve(options);
}

int serve(const CheckOptions& options) {
  // The worker reports crashes itself, and te-fl's handlers would count as left behind by the
  // plugin that is being loaded when they are installed.
  static_cast<void>(te_fl::environment::set("TE_FL_CRASH_REPORT", "0"));
  catch_signals();
  try {
    return Worker(options).serve();
  } catch (const std::exception& e) {
    say({{"failed", std::string("te-fl check: ") + e.what()}});
    return 1;
  }
}

}  // namespace te_fl_tool::check
