// te-fl quarantine: lists and ends the quarantines of implementations that
// TE_FL_VERIFY_ACTION=quarantine started.
#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>

#include "commands.hpp"
#include "conformance/check/output.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl_tool {
namespace {

using nlohmann::json;

template <class T>
std::vector<std::string> list_names(uint64_t mask, int count) {
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) {
    if ((mask >> i & 1) != 0) names.emplace_back(te_fl::name(static_cast<T>(i)));
  }
  return names;
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& w : words) text += (text.empty() ? "" : "|") + w;
  return text;
}

std::vector<std::string> list_dtypes(const te_fl::Quarantine& q) {
  return list_names<te_fl::DType>(q.dtypes, TE_FL_DTYPE_COUNT);
}
std::vector<std::string> list_scalings(const te_fl::Quarantine& q) {
  return list_names<te_fl::Scaling>(q.scalings, TE_FL_SCALING_COUNT);
}

json to_json(const te_fl::Quarantine& q) {
  return {{"op", q.op},
          {"impl_id", q.impl_id},
          {"owner", q.owner},
          {"build_id", q.build_id},
          {"chip", q.chip},
          {"driver", q.driver},
          {"dtypes", list_dtypes(q)},
          {"scalings", list_scalings(q)},
          {"reason", q.reason},
          {"case", q.case_file},
          {"replay", q.replay}};
}

int list(bool as_json) {
  const auto entries = te_fl::quarantines();
  if (!entries.ok()) {
    complain(entries.status().to_string());
    return kProblem;
  }
  const std::string file = te_fl::quarantine_file();
  if (as_json) {
    json out = {{"file", file}, {"entries", json::array()}};
    for (const te_fl::Quarantine& q : *entries) out["entries"].push_back(to_json(q));
    std::printf("%s\n", json_text(out).c_str());
    return kSuccess;
  }
  if (entries->empty()) {
    std::printf("nothing is quarantined (%s)\n",
                file.empty() ? "no file is kept: TE_FL_QUARANTINE_FILE is empty" : file.c_str());
    return kSuccess;
  }
  Table table({"op", "implementation", "from", "dtypes", "scaling", "on", "why"});
  for (const te_fl::Quarantine& q : *entries) {
    table.add({q.op, q.impl_id, q.owner, joined(list_dtypes(q)), joined(list_scalings(q)),
               q.chip + (q.driver.empty() ? "" : ", " + q.driver), q.reason});
  }
  table.print();
  for (const te_fl::Quarantine& q : *entries) {
    if (!q.replay.empty())
      std::printf("\n%s by %s again:\n  %s\n", q.op.c_str(), q.impl_id.c_str(), q.replay.c_str());
  }
  std::printf(
      "\n%zu of %s; an entry holds for the build, chip and driver that it was found with.\n"
      "`te-fl quarantine clear OP --impl ID` ends it, `te-fl quarantine clear --all` all.\n",
      entries->size(), file.c_str());
  return kSuccess;
}

// Suggests the quarantined op and implementation whose names are nearest to those that were given:
// ", did you mean ...", or nothing if none is near.
std::string nearest_entry(const QuarantineOptions& options) {
  std::set<std::string> ops, impls;
  const auto entries = te_fl::quarantines();
  if (!entries.ok()) return {};
  for (const te_fl::Quarantine& q : *entries) {
    ops.insert(q.op);
    // Prefers the implementations of the given op, if there are entries about it.
    if (options.op.empty() || q.op == options.op) impls.insert(q.impl_id);
  }
  if (impls.empty()) {
    for (const te_fl::Quarantine& q : *entries) impls.insert(q.impl_id);
  }
  std::string text;
  if (!options.op.empty() && !ops.contains(options.op))
    text += did_you_mean(options.op, {ops.begin(), ops.end()});
  if (!options.impl.empty() && !impls.contains(options.impl))
    text += did_you_mean(options.impl, {impls.begin(), impls.end()});
  return text;
}

}  // namespace

int quarantine(const QuarantineOptions& options) {
  if (!options.clear) return list(options.json);
  if (options.op.empty() && options.impl.empty() && !options.all) {
    complain("quarantine clear needs an op, --impl ID, or --all");
    return kUsage;
  }
  if (options.all && !(options.op.empty() && options.impl.empty())) {
    complain("quarantine clear takes --all, or an op and --impl, not both");
    return kUsage;
  }
  const auto cleared = te_fl::clear_quarantines(options.op, options.impl);
  if (!cleared.ok()) {
    complain(cleared.status().to_string());
    return kProblem;
  }
  if (*cleared == 0 && !options.all) {
    complain("no entry is about " + (options.op.empty() ? options.impl : options.op) +
             (options.op.empty() || options.impl.empty() ? "" : " and " + options.impl) +
             nearest_entry(options) + "; `te-fl quarantine list` shows them");
    return kUsage;
  }
  if (options.json) {
    std::printf("%s\n", json_text({{"cleared", *cleared}}).c_str());
  } else {
    std::printf("%d %s cleared\n", *cleared, *cleared == 1 ? "entry" : "entries");
  }
  return kSuccess;
}

}  // namespace te_fl_tool
