#include "conformance/check/choice.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "conformance/check/steps.hpp"
#include "te_fl/environment.hpp"

namespace te_fl_tool::check {
namespace {

namespace conformance = te_fl::conformance;
using conformance::Table;

std::string listed(const std::set<std::string>& names) {
  std::string text;
  size_t n = 0;
  for (const std::string& name : names) {
    if (++n > 8) return text + " and " + std::to_string(names.size() - 8) + " more";
    text += (text.empty() ? "" : ", ") + name;
  }
  return text.empty() ? "none" : text;
}

// An error text for an option: "--op rleu: te-fl has no such op; did you mean 'relu'?"
std::string mistake(const std::string& option, const std::string& value, const std::string& what,
                    const std::set<std::string>& names) {
  const std::string near = te_fl::environment::nearest(value, {names.begin(), names.end()});
  return option + " " + value + ": " + what +
         (near.empty() ? "; there is " + listed(names) : "; did you mean '" + near + "'?");
}

std::set<std::string> values(const std::vector<Target>& targets, std::string Target::*member) {
  std::set<std::string> all;
  for (const Target& t : targets)
    if (!(t.*member).empty()) all.insert(t.*member);
  return all;
}

// Keeps only the targets whose `member` equals `value`; keeps all if `value` is empty.
void keep(std::vector<Target>& targets, std::string Target::*member, const std::string& value) {
  if (value.empty()) return;
  std::erase_if(targets, [&](const Target& t) { return t.*member != value; });
}

std::string wrong_op(const CheckOptions& o, const Table& table, const std::vector<Target>& all) {
  std::set<std::string> here = values(all, &Target::op), known = here;
  if (o.op.empty() || here.count(o.op) != 0) return {};
  for (const auto& c : table) known.insert(c.op);
  if (known.count(o.op) == 0) return mistake("--op", o.op, "no op has this name", known);
  return "--op " + o.op + ": the plugin does not implement it; it implements " + listed(here);
}

// The error for a --case that matches no case. --case may be any substring of a name, so the
// suggestions may be substrings too.
std::string wrong_case(const CheckOptions& o, const Table& table,
                       const std::set<std::string>& ops) {
  CheckOptions every = o;
  every.name.clear(), every.quick = false;
  std::set<std::string> names;
  std::string first = device_steps()[0].name;
  const auto take = [&](const std::string& name) {
    if (names.empty()) first = name;
    names.insert(name);
    for (size_t at = 0, end; at < name.size(); at = end + 1) {
      end = std::min(name.find('/', at), name.size());
      names.insert(name.substr(at, end - at));
    }
  };
  for (const std::string& op : ops) {
    for (const auto& c : chosen_cases(every, table, op)) take(c.name);
    // All ops have similar sweep names, so those of one op suffice for suggestions.
    if (op == *ops.begin())
      for (const auto& c : chosen_sweep(every, op)) take(c.name);
  }
  for (const DeviceStep& step : device_steps()) take(step.name);
  const std::string near = te_fl::environment::nearest(o.name, {names.begin(), names.end()});
  return "--case " + o.name + ": no case of " + (ops.size() == 1 ? *ops.begin() : "these ops") +
         " has this in its name" +
         (near.empty() ? "; one of them is '" + first + "'" : "; did you mean '" + near + "'?");
}

// Records the options that restrict the check. `less`: --device excludes something that would
// otherwise be checked.
void say_what_is_left_out(const CheckOptions& o, bool less, Report& report) {
  if (o.quick) report.left_out.push_back("--quick");
  for (const auto& [option, value] : {std::pair("--op ", &o.op),
                                      {"--family ", &o.family},
                                      {"--impl ", &o.impl},
                                      {"--device ", &o.device},
                                      {"--case ", &o.name}})
    if (!value->empty() && (value != &o.device || less)) report.left_out.push_back(option + *value);
}

// Returns the set of (op, implementation, device type). Only the first device of each type is
// checked.
std::set<std::string> served(const std::vector<Target>& targets) {
  std::set<std::string> all;
  for (const Target& t : targets)
    all.insert(t.op + " " + t.impl + " " + t.device.substr(0, t.device.rfind(':')));
  return all;
}

}  // namespace

Table chosen_cases(const CheckOptions& options, const Table& all, const std::string& op) {
  Table chosen;
  const auto take = [&](Table table) {
    for (auto& c : table) {
      if (c.op != op || c.name.find(options.name) == std::string::npos) continue;
      const bool keep = !c.large && (chosen.size() < 3 || (c.seed >> 32) % 4 == 0);
      if (!options.quick || keep || !options.name.empty()) chosen.push_back(std::move(c));
    }
  };
  take(all);
  take(conformance::fuzz_cases(options.seed, options.quick ? 3 : options.thorough ? 60 : 12));
  if (options.name.find("sweep/") != std::string::npos)
    take(conformance::sweep_cases(op, options.seed, options.thorough));
  return chosen;
}

Table chosen_sweep(const CheckOptions& options, const std::string& op) {
  if (!options.name.empty()) return {};
  Table chosen = conformance::sweep_cases(op, options.seed, options.thorough);
  if (options.quick)
    std::erase_if(chosen, [](const conformance::Case& c) { return (c.seed >> 32) % 8 != 0; });
  return chosen;
}

bool is_chosen_device_step(const CheckOptions& options, const std::string& name) {
  return options.op.empty() && options.family.empty() && options.impl.empty() &&
         name.find(options.name) != std::string::npos;
}

std::string choose(const CheckOptions& options, const std::vector<Target>& all, Report& report) {
  const Table table = conformance::all_cases();
  std::set<std::string> families, devices = values(all, &Target::device);
  for (const auto& c : table) families.insert(c.family);
  for (const DeviceFacts& d : report.devices) devices.insert(d.name);
  if (const std::string wrong = wrong_op(options, table, all); !wrong.empty()) return wrong;
  if (!options.family.empty() && families.count(options.family) == 0)
    return mistake("--family", options.family, "the table has no such family", families);
  const std::set<std::string> impls = values(all, &Target::impl);
  if (!options.impl.empty() && impls.count(options.impl) == 0)
    return mistake("--impl", options.impl, "the plugin has no such implementation", impls);
  if (!options.device.empty() && devices.count(options.device) == 0)
    return mistake("--device", options.device,
                   "nothing of the plugin is on such a device (another plugin's device is here "
                   "if that is installed, or TE_FL_PLUGIN_PATH names its manifest's folder)",
                   devices);

  report.targets = all;
  keep(report.targets, &Target::op, options.op);
  keep(report.targets, &Target::family, options.family);
  keep(report.targets, &Target::impl, options.impl);
  std::string nowhere;  // implementations whose devices are absent
  for (const Target& t : report.targets)
    if (t.device.empty()) nowhere += (nowhere.empty() ? "" : ", ") + t.op + " (" + t.impl + ")";
  if (!nowhere.empty()) report.left_out.push_back("no device is here for " + nowhere);
  std::erase_if(report.targets, [](const Target& t) { return t.device.empty(); });
  const std::set<std::string> everywhere = served(report.targets);
  std::erase_if(report.targets, [&](const Target& t) {
    return options.device.empty() ? !t.first : t.device != options.device;
  });
  bool less = served(report.targets) != everywhere;
  if (!options.device.empty())
    less = std::erase_if(report.devices,
                         [&](const DeviceFacts& d) { return d.name != options.device; }) > 0 ||
           less;
  const bool some = !options.op.empty() || !options.family.empty() || !options.impl.empty();
  if (some && report.targets.empty() && nowhere.empty())
    return "the plugin has no implementation that all of --op, --family, --impl and --device name";
  say_what_is_left_out(options, less, report);
  if (options.name.empty()) return {};

  const std::set<std::string> ops = values(report.targets, &Target::op);
  std::set<std::string> with_cases;
  for (const std::string& op : ops)
    if (!chosen_cases(options, table, op).empty()) with_cases.insert(op);
  std::erase_if(report.targets, [&](const Target& t) { return with_cases.count(t.op) == 0; });
  const auto& steps = device_steps();
  const bool device =
      !report.devices.empty() && std::any_of(steps.begin(), steps.end(), [&](const DeviceStep& s) {
        return is_chosen_device_step(options, s.name);
      });
  return with_cases.empty() && !device ? wrong_case(options, table, ops) : std::string();
}

}  // namespace te_fl_tool::check
