#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "commands.hpp"
#include "conformance/check/output.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl_tool {

using nlohmann::json;

namespace {

// Returns the part of an op's name nearest to a text. Parts are a name's words and their endings,
// such as 'norm' in 'layernorm_fwd'.
std::string nearest_part(const std::string& text, const std::vector<std::string>& names) {
  std::set<std::string> words, ends;
  for (const std::string& name : names) {
    for (size_t at = 0; at < name.size();) {
      const size_t end = std::min(name.find_first_of("_:", at), name.size());
      words.insert(name.substr(at, end - at));
      for (size_t from = at + 1; from + 2 < end; ++from) ends.insert(name.substr(from, end - from));
      at = end + 1;
    }
  }
  const std::string word = te_fl::environment::nearest(text, {words.begin(), words.end()});
  return !word.empty() ? word : te_fl::environment::nearest(text, {ends.begin(), ends.end()});
}

}  // namespace

int ops(const OpsOptions& options) {
  auto& registry = te_fl::OpManager::instance().registry();
  const auto names = registry.op_names();
  if (options.names) {
    for (const auto& name : names) std::printf("%s\n", name.c_str());
    return kSuccess;
  }
  std::map<std::string, std::vector<te_fl::OpImplInfo>> by_op;
  std::set<std::string> impls;
  for (auto& impl : registry.snapshot()) {
    impls.insert(impl.impl_id);
    by_op[impl.op].push_back(std::move(impl));
  }
  std::vector<std::string> shown;
  for (const auto& name : names) {
    if (options.family.empty() || name.find(options.family) != std::string::npos)
      shown.push_back(name);
  }
  if (shown.empty()) {
    std::string near = te_fl::environment::nearest(options.family, names);
    if (near.empty()) near = nearest_part(options.family, names);
    complain("no op's name contains '" + options.family + "'" +
             (near.empty() ? "" : "; did you mean '" + near + "'?") +
             " (`te-fl ops --names` lists all)");
    return kUsage;
  }
  if (options.json) {
    json out = json::array();
    for (const auto& name : shown) {
      json entry = {{"op", name}, {"implementations", json::array()}};
      for (const auto& i : by_op[name]) {
        entry["implementations"].push_back(
            {{"impl_id", i.impl_id},
             {"kind", te_fl::to_string(i.kind)},
             {"vendor", i.vendor},
             {"priority", i.priority},
             {"owner", i.owner},
             {"deterministic", (i.desc.flags & TE_FL_OP_DETERMINISTIC) != 0},
             {"later_args", i.desc.later_args == nullptr ? "" : i.desc.later_args}});
      }
      out.push_back(entry);
    }
    std::printf("%s\n", json_text(out).c_str());
    return kSuccess;
  }
  std::vector<std::string> header = {"op"};
  header.insert(header.end(), impls.begin(), impls.end());
  Table table(header);
  for (const auto& name : shown) {
    std::vector<std::string> row = {name};
    for (const auto& id : impls) {
      const auto& list = by_op[name];
      const auto found =
          std::find_if(list.begin(), list.end(), [&](const auto& i) { return i.impl_id == id; });
      row.push_back(found == list.end() ? paint(Color::kDim, "-")
                                        : paint(Color::kGreen, std::to_string(found->priority)));
    }
    table.add(row);
  }
  table.print();
  std::printf(
      "\n%zu ops; a number is the implementation's priority (higher is tried first), - means it "
      "has none.\n",
      shown.size());
  return kSuccess;
}

}  // namespace te_fl_tool
