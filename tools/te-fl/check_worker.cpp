// The child of te-fl check: opens the plugin and runs its ops, saying every step before it is made.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <optional>
#include <string_view>

#include "check_steps.hpp"
#include "conformance/device_mirror.hpp"

namespace te_fl_tool::check {
namespace {

namespace conformance = te_fl::conformance;
using nlohmann::json;
using te_fl::Device;
using te_fl::Status;

constexpr int kOrders = 3, kAnswers = 4;  // the parent's ends are pipes

void say(const json& message) {
  const std::string line = message.dump() + "\n";
  for (size_t at = 0; at < line.size();) {
    const ssize_t n = write(kAnswers, line.data() + at, line.size() - at);
    if (n <= 0) _exit(1);  // the parent has gone
    at += static_cast<size_t>(n);
  }
}

// Says which signal ended the process and what it had touched, then lets it end.
void last_words(int signal, siginfo_t* info, void*) {
  char text[256];
  const bool fault = signal == SIGSEGV || signal == SIGBUS;
  const bool device = fault && conformance::is_mirrored(info->si_addr);
  const int n =
      fault ? std::snprintf(text, sizeof text, "{\"crash\": \"SIG%s at address %p%s\"}\n",
                            sigabbrev_np(signal), info->si_addr,
                            device ? ", which is memory of the device: the host may not "
                                     "read or write it (rule R11)"
                                   : "")
            : std::snprintf(text, sizeof text, "{\"crash\": \"SIG%s\"}\n", sigabbrev_np(signal));
  if (write(kAnswers, text, static_cast<size_t>(n)) < 0) _exit(1);
  std::signal(signal, SIG_DFL);
  raise(signal);
}

void catch_signals() {
  static char stack[64 << 10];
  const stack_t alternate{stack, 0, sizeof stack};
  sigaltstack(&alternate, nullptr);
  struct sigaction action {};
  action.sa_sigaction = last_words;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESETHAND;
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT})
    sigaction(signal, &action, nullptr);
}

// The implementations of one plugin, on the devices that they serve.
std::vector<Target> targets_of(const te_fl::plugins::PluginInfo& plugin,
                               const CheckOptions& options, const conformance::Table& table) {
  std::set<std::string> in_table, in_family;
  for (const auto& c : table) {
    in_table.insert(c.op);
    if (c.family == options.family) in_family.insert(c.op);
  }
  std::vector<Target> targets;
  for (const auto& impl : te_fl::OpRegistry::instance().snapshot()) {
    const std::string entry = impl.op + ": " + impl.impl_id;
    if (std::find(plugin.ops.begin(), plugin.ops.end(), entry) == plugin.ops.end()) continue;
    if (!options.op.empty() && impl.op != options.op) continue;
    if (!options.impl.empty() && impl.impl_id != options.impl) continue;
    if (!options.family.empty() && in_family.count(impl.op) == 0) continue;
    std::set<int32_t> types;
    for (const Device& device : te_fl::devices::list()) {
      if ((impl.desc.device_types >> device.type & 1) == 0) continue;
      const bool ours = device.type != TE_FL_DEVICE_EXT || impl.desc.provider == nullptr ||
                        te_fl::devices::intern_provider(impl.desc.provider) == device.provider;
      if (!ours) continue;
      const std::string name = te_fl::to_string(device);
      if (options.device.empty() ? !types.insert(device.type).second : name != options.device)
        continue;
      targets.push_back({impl.op, impl.impl_id, name, in_table.count(impl.op) != 0});
    }
  }
  return targets;
}

// `state` becomes what was before anything of the plugin ran, so that what it changes shows.
te_fl::Result<te_fl::plugins::PluginInfo> open_plugin(const CheckOptions& options,
                                                      ProcessState& state) {
  state = ProcessState::now();
  te_fl::OpManager::instance();
  if (options.builtin.empty()) {
    const ProcessState with_others = ProcessState::now();  // what installed plugins changed
    auto loaded = te_fl::plugins::load(options.plugin);
    if (loaded.ok()) state = with_others;
    if (loaded.ok() || loaded.status().code() != te_fl::StatusCode::kAlreadyExists) return loaded;
    // An installed one of that name came first, by its manifest.
    for (const auto& other : te_fl::plugins::list())
      if (other.origin != "built-in" && other.state == te_fl::plugins::State::kActive)
        TE_FL_RETURN_IF_ERROR(te_fl::plugins::deactivate(other.name));
    return te_fl::plugins::load(options.plugin);
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
      say({{"failed", plugin.status().to_string()}});
      return 1;
    }
    plugin_ = *plugin;
    json targets = json::array();
    for (const Target& t : targets_of(plugin_, options_, table_))
      targets.push_back(
          {{"op", t.op}, {"impl", t.impl}, {"device", t.device}, {"in_table", t.in_table}});
    say({{"hello",
          {{"name", plugin_.name},
           {"vendor", plugin_.vendor},
           {"version", plugin_.version},
           {"build_id", plugin_.build_id},
           {"path", plugin_.path},
           {"devices", plugin_.devices},
           {"targets", targets},
           {"changed", environment_.changed()}}}});
    std::string line;
    while (next_order(line)) {
      const json order = json::parse(line);
      if (order.contains("lifecycle"))
        lifecycle(order);
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

  conformance::Table cases_of(const std::string& op) const {
    conformance::Table chosen;
    const auto take = [&](conformance::Table all) {
      for (auto& c : all) {
        if (c.op != op || c.name.find(options_.name) == std::string::npos) continue;
        const bool keep = !c.large && (chosen.size() < 3 || (c.seed >> 32) % 4 == 0);
        if (!options_.quick || keep || !options_.name.empty()) chosen.push_back(std::move(c));
      }
    };
    take(table_);
    take(conformance::fuzz_cases(options_.seed, options_.quick ? 3 : 12));
    return chosen;
  }

  // Steps are numbered, four for each case; those before order["from"] have been made.
  void target(const json& order) {
    Subject subject;
    subject.op = order.at("op"), subject.impl = order.at("impl");
    subject.device_name = order.at("device");
    subject.device = te_fl::parse_device(subject.device_name).value();
    for (const auto& impl : te_fl::OpRegistry::instance().snapshot())
      if (impl.op == subject.op && impl.impl_id == subject.impl) subject.flags = impl.desc.flags;
    const int from = order.at("from");
    const conformance::Table cases = cases_of(subject.op);
    int step = 0;
    for (const auto& c : cases) {
      one_case(subject, c, step, from);
      step += 4;
    }
    for (const ExtraStep& extra : extra_steps()) {
      if (step >= from) {
        begin(step, step + 1, subject, extra.name, "");
        for (Finding& f : extra.run(subject, cases)) report(subject, std::move(f));
      }
      ++step;
    }
  }

  void one_case(const Subject& subject, const conformance::Case& c, int step, int from) {
    if (from > step + 2) return;
    if (from <= step) begin(step, step + 4, subject, "result", c.name);
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
      f = result_of(subject, c, *prepared);
      const bool passed = f.outcome == Outcome::kPass;
      report(subject, f);
      if (!passed) return;
    }
    if (from <= step + 1 && (subject.flags & TE_FL_OP_DETERMINISTIC) != 0) {
      begin(step + 1, step + 2, subject, "determinism", c.name);
      report(subject, determinism_of(subject, c, *prepared));
    }
    if (from <= step + 2 && !subject.device.is_host()) {
      begin(step + 2, step + 3, subject, "stream", c.name);
      if (auto found = stream_of(subject, c, *prepared)) report(subject, std::move(*found));
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
    const std::string changed = environment_.changed();
    if (changed.empty()) return;
    environment_.restore();
    f.check = "environment", f.outcome = Outcome::kFail, f.message = "rule R8: " + changed;
    say({{"result", f}});
  }

  void lifecycle(const json& order) {
    const conformance::Table none;
    std::vector<std::pair<Subject, conformance::Table>> work;
    for (const json& t : order.at("lifecycle")) {
      Subject subject;
      subject.op = t.at("op"), subject.impl = t.at("impl"), subject.device_name = t.at("device");
      work.emplace_back(subject, cases_of(subject.op));
    }
    say({{"begin", 0}, {"resume", -1}, {"check", "lifecycle"}, {"op", ""}, {"case", ""}});
    for (const Finding& f : structs_of(plugin_)) say({{"result", f}});
    for (const Finding& f : lifecycle_of(plugin_, work)) say({{"result", f}});
  }

  const CheckOptions& options_;
  conformance::Table table_;
  te_fl::plugins::PluginInfo plugin_;
  ProcessState environment_;
};

}  // namespace

void beat() {
  static std::atomic<int64_t> last{0};
  const auto now = std::chrono::duration_cast<std::chrono::seconds>(
                       std::chrono::steady_clock::now().time_since_epoch())
                       .count();
  if (last.exchange(now) == now) return;
  constexpr std::string_view kLine = "{\"alive\": true}\n";
  if (write(kAnswers, kLine.data(), kLine.size()) <= 0) _exit(1);
}

int serve(const CheckOptions& options) {
  catch_signals();
  try {
    return Worker(options).serve();
  } catch (const std::exception& e) {
    say({{"failed", std::string("te-fl check: ") + e.what()}});
    return 1;
  }
}

}  // namespace te_fl_tool::check
