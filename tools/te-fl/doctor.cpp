#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "commands.hpp"
#include "conformance/check/output.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl_tool {
namespace {

using nlohmann::json;
using te_fl::Tensor;

enum class Level { kGood, kNote, kProblem };

struct Finding {
  Level level;
  std::string what;
  std::string disables;  // features that do not work because of the problem
  std::string remedy;
};

class Report {
 public:
  void add(Level level, std::string what, std::string disables = "", std::string remedy = "") {
    findings_.push_back({level, std::move(what), std::move(disables), std::move(remedy)});
  }
  bool problems() const {
    for (const auto& f : findings_) {
      if (f.level == Level::kProblem) return true;
    }
    return false;
  }
  void print() const {
    for (const auto& f : findings_) {
      static const Color colors[] = {Color::kGreen, Color::kYellow, Color::kRed};
      static const char* const marks[] = {"ok     ", "note   ", "problem"};
      const int i = static_cast<int>(f.level);
      std::printf("%s  %s\n", paint(colors[i], marks[i]).c_str(), f.what.c_str());
      if (!f.disables.empty()) std::printf("         without it: %s\n", f.disables.c_str());
      if (!f.remedy.empty()) std::printf("         to mend it: %s\n", f.remedy.c_str());
    }
  }
  json to_json() const {
    static const char* const names[] = {"ok", "note", "problem"};
    json out = json::array();
    for (const auto& f : findings_) {
      out.push_back({{"level", names[static_cast<int>(f.level)]},
                     {"what", f.what},
                     {"disables", f.disables},
                     {"remedy", f.remedy}});
    }
    return out;
  }

 private:
  std::vector<Finding> findings_;
};

void check_environment(Report& report) {
  const te_fl::Status status = te_fl::environment::status();
  if (!status.ok()) {
    report.add(Level::kProblem, "environment: " + status.to_string(),
               "calls fail until the policy is valid",
               "correct the variable; te-fl env lists all of them");
    return;
  }
  const auto policy = te_fl::current_policy();
  if (!policy.ok()) {
    report.add(Level::kProblem, "policy: " + policy.status().to_string(),
               "every call fails with this message", "correct the variable it names");
    return;
  }
  if (const te_fl::Status watching = te_fl::watch_status(); !watching.ok()) {
    report.add(Level::kProblem, "watching: " + watching.to_string(),
               "every call fails with this message", "correct the variable it names, or unset it");
  }
  int set = 0;
  for (const auto& v : te_fl::environment::table()) set += v.origin != "default";
  report.add(Level::kGood, "environment: " + std::to_string(set) +
                               " variables set; policy: " + policy->describe());
}

// Reports lists of the policy that name implementations or vendors which are not there: with a
// problem if nothing in the list is there, so that every call under it fails. The plugins are
// loaded.
void check_policy_names(Report& report) {
  const auto policy = te_fl::current_policy();
  if (!policy.ok()) return;
  const te_fl::PolicySettings& settings = policy->settings();
  std::map<std::string, std::set<std::string>> impls;  // by op
  for (const te_fl::OpImplInfo& i : te_fl::OpRegistry::instance().snapshot())
    impls[i.op].insert(i.impl_id);
  const auto look_in = [&](const std::string& op, const std::string& where,
                           const std::vector<te_fl::PolicyToken>& tokens) {
    const std::set<std::string>& present = impls[op];
    size_t absent = 0;
    std::string names;
    for (const te_fl::PolicyToken& token : tokens) {
      if (token.type != te_fl::PolicyToken::Type::kImpl || present.contains(token.name)) continue;
      ++absent;
      names += (names.empty() ? "'" : ", '") + token.name + "'" +
               did_you_mean(token.name, {present.begin(), present.end()});
    }
    if (absent == 0) return;
    report.add(
        absent == tokens.size() ? Level::kProblem : Level::kNote,
        "policy: " + where + " names " + names + ", which is not registered for op '" + op + "'",
        absent == tokens.size() ? "every call of " + op + " that the list is for"
                                : "what the list prefers; the rest of it is used",
        "correct the name, or load the plugin that has it; te-fl ops " + op + " lists all");
  };
  for (const auto& [op, tokens] : settings.per_op) look_in(op, "the list of op " + op, tokens);
  for (const te_fl::SignatureList& list : settings.per_signature)
    look_in(list.op, "a list of one signature of op " + list.op + " on " + list.device, list.use);
}

// Reports the active quarantines.
void check_quarantines(Report& report) {
  const auto entries = te_fl::quarantines();
  if (!entries.ok()) return;
  for (const te_fl::Quarantine& q : *entries) {
    report.add(Level::kNote,
               "quarantine: " + q.impl_id + " of " + q.owner + " is not used for " + q.op + " on " +
                   (q.chip.empty() ? "the chip" : q.chip) + " as it was built then: " + q.reason,
               "the signature that `te-fl quarantine list` names, by that implementation",
               (q.replay.empty() ? "" : "`" + q.replay + "` shows it again; ") +
                   "a corrected build, or `te-fl quarantine clear " + q.op + " --impl " +
                   q.impl_id + "`");
  }
}

void check_surroundings(Report& report, const std::string& plugin) {
  const auto findings = te_fl::plugins::diagnose(plugin);
  if (!findings.ok()) {
    report.add(Level::kProblem, "plugin " + plugin + ": " + findings.status().to_string());
    return;
  }
  using From = te_fl::plugins::Finding::Level;
  for (const auto& f : *findings) {
    const Level level = f.level == From::kOk     ? Level::kGood
                        : f.level == From::kNote ? Level::kNote
                                                 : Level::kProblem;
    report.add(level, plugin + ": " + f.subject + ": " + f.state, f.disables, f.remedy);
  }
}

// Returns true for a plugin that TE_FL_PLUGIN_MODULES names and that was not found. Excludes a
// dotted name, which a Python program imports, and a plugin that TE_FL_SKIP_CUDA leaves out on
// purpose.
bool is_missed(const te_fl::plugins::PluginInfo& p) {
  return p.origin == "TE_FL_PLUGIN_MODULES" && p.path.empty() &&
         p.name.find('.') == std::string::npos &&
         p.reason.find("TE_FL_SKIP_CUDA") == std::string::npos;
}

void check_plugins(Report& report) {
  for (const auto& p : te_fl::plugins::list()) {
    const std::string name = "plugin " + (p.name.empty() ? p.path : p.name);
    const std::string state(te_fl::plugins::to_string(p.state));
    if (p.state == te_fl::plugins::State::kActive) {
      report.add(Level::kGood, name + ": " + state + ", " + std::to_string(p.ops.size()) + " ops" +
                                   (p.abi.empty() ? "" : ", ABI " + p.abi) +
                                   (p.path.empty() ? "" : ", " + p.path));
      if (!p.reason.empty())
        report.add(Level::kNote, name + ": " + p.reason, "the ops named", "use a newer te-fl");
      check_surroundings(report, p.name);
    } else {
      const bool failed =
          p.state == te_fl::plugins::State::kFailed || p.state == te_fl::plugins::State::kAbandoned;
      report.add(failed || is_missed(p) ? Level::kProblem : Level::kNote,
                 name + ": " + state + " (" + p.origin + "): " + p.reason,
                 failed ? "its ops and devices; other implementations run" : "");
    }
  }
}

void check_search_path(Report& report) {
  for (const auto& folder : te_fl::plugins::search_path())
    report.add(Level::kNote, "plugin manifests: " + folder);
}

// Dispatches a small GEMM: checks that it works, and that every rejected candidate gives a
// reason.
void check_gemm(Report& report) {
  const float values[4] = {1, 2, 3, 4};
  auto a = Tensor::from_values({2, 2}, values);
  auto d = Tensor::empty({2, 2}, te_fl::DType::kF32);
  if (!a.ok() || !d.ok()) {
    report.add(Level::kProblem, "host memory: " + (a.ok() ? d.status() : a.status()).to_string());
    return;
  }
  const te_fl_generic_gemm_args args{.a = *a, .b = *a, .d = *d};
  auto& manager = te_fl::OpManager::instance();
  if (const auto resolution = manager.resolve(te_fl::op::generic_gemm, &args); resolution.ok()) {
    for (const auto& c : resolution->candidates) {
      if (!c.accepted)
        report.add(Level::kNote, "generic_gemm on " + c.impl_id + ": refused: " + c.reason);
    }
  }
  const te_fl::Status status = manager.call(te_fl::op::generic_gemm, &args);
  if (!status.ok()) {
    report.add(Level::kProblem, "a 2x2 product on the host fails: " + status.to_string(),
               "everything", "see the message; te-fl explain generic_gemm --dtype f32");
    return;
  }
  const float* r = d->data<float>();
  const bool right = r[0] == 7 && r[1] == 10 && r[2] == 15 && r[3] == 22;
  std::string by;
  for (const auto& u : manager.usage()) by = u.impl_id;
  report.add(right ? Level::kGood : Level::kProblem, std::string("a 2x2 product on the host by ") +
                                                         by + (right ? " is right" : " is WRONG"));
}

// Reports the implementations of attention that an accelerator cannot use, and why.
void check_attention(Report& report) {
  for (const te_fl::Device& device : te_fl::devices::list()) {
    if (device.is_host()) continue;
    auto heads = Tensor::empty({1, 16, 1, 16}, te_fl::DType::kBF16, device);
    auto out = Tensor::empty({1, 16, 1, 16}, te_fl::DType::kBF16, device);
    // A log-sum-exp output makes this a training forward; inference of this size would use simpler
    // kernels.
    auto lse = Tensor::empty({1, 1, 16}, te_fl::DType::kF32, device);
    bool there = true;
    for (const auto* made : {&heads, &out, &lse}) {
      if (there && !made->ok()) {
        there = false;
        report.add(Level::kProblem,
                   te_fl::to_string(device) + ": no memory: " + made->status().to_string());
      }
    }
    if (!there) continue;
    te_fl_fused_attn_fwd_args args;
    args.q = args.k = args.v = *heads;
    args.o = *out;
    args.softmax_lse = *lse;
    args.layout = TE_FL_LAYOUT_BSHD;
    const auto found = te_fl::OpManager::instance().resolve(te_fl::op::fused_attn_fwd, &args);
    if (!found.ok()) continue;
    for (const auto& c : found->candidates) {
      if (c.kind == te_fl::Kind::kVendor && !c.accepted) {
        report.add(Level::kNote, "fused_attn_fwd on " + c.impl_id + ": refused: " + c.reason,
                   "attention on " + te_fl::to_string(device) + " runs in " +
                       (found->impl_id.empty() ? "no implementation" : found->impl_id));
      }
    }
    report.add(Level::kGood, "attention on " + te_fl::to_string(device) + ": " +
                                 (found->impl_id.empty() ? "none" : found->impl_id));
  }
}

// Reports accelerators on the PCI bus whose plugin is missing.
void check_hardware(Report& report) {
  struct Known {
    const char* pci_vendor;
    const char* name;
    const char* plugin;
  };
  static constexpr Known known[] = {
      {"0x10de", "NVIDIA", "cuda"}, {"0x1002", "AMD", "opencl"}, {"0x8086", "Intel", "opencl"}};
  bool any = false;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/sys/bus/pci/devices", error)) {
    std::string vendor, device_class;
    std::ifstream(entry.path() / "vendor") >> vendor;
    std::ifstream(entry.path() / "class") >> device_class;
    // 0x03....: display controllers; 0x12....: processing accelerators.
    if (device_class.rfind("0x03", 0) != 0 && device_class.rfind("0x12", 0) != 0) continue;
    for (const auto& k : known) {
      if (vendor != k.pci_vendor) continue;
      any = true;
      bool active = false;
      for (const auto& p : te_fl::plugins::list()) {
        active = active || (p.name == k.plugin && p.state == te_fl::plugins::State::kActive);
      }
      const std::string where = std::string(k.name) + " device " + entry.path().filename().string();
      active ? report.add(Level::kGood, where + ": used by plugin " + k.plugin)
             : report.add(Level::kNote, where + ": no active plugin " + k.plugin,
                          "calls run on the host",
                          std::string("install the plugin's manifest in one of the folders above "
                                      "(te-fl info shows its state)"));
    }
  }
  if (!any)
    report.add(Level::kNote, "no accelerator on the PCI bus; the host backends run all calls");
}

}  // namespace

int doctor(bool as_json) {
  te_fl::OpManager::instance();
  Report report;
  check_environment(report);
  check_quarantines(report);
  leave_watching_to_programs();
  check_plugins(report);
  check_policy_names(report);
  check_search_path(report);
  check_hardware(report);
  check_gemm(report);
  check_attention(report);
  if (as_json) {
    std::printf("%s\n", json_text(report.to_json()).c_str());
  } else {
    report.print();
    std::printf("\n%s\n", report.problems() ? "There are problems; see above." : "No problems.");
  }
  return report.problems() ? kProblem : kSuccess;
}

}  // namespace te_fl_tool
