#include "conformance/coverage.hpp"

#include <map>
#include <set>
#include <sstream>

#include "te_fl/te_fl.hpp"

namespace te_fl::conformance {
namespace {

// The properties of one argument that the cases have used.
struct Seen {
  std::set<int> dtypes, scalings;
  std::set<double> values;
  std::set<std::string> aliased;
  bool present = false, absent = false;
};

void look_at_tensor(Seen& seen, const Tensor& t, const Problem& p) {
  seen.dtypes.insert(t.spec.dtype), seen.scalings.insert(t.spec.scaling);
  auto prefix = [](const std::string& name) { return name.substr(0, name.find('[')); };
  for (const auto& other : p.tensors)
    if (other.get() != &t && t.data != nullptr && other->data == t.data)
      seen.aliased.insert(prefix(other->name));
}

void look_at(const te_fl_arg_desc& arg, const Problem& p, Seen& seen) {
  if (arg.type == TE_FL_ARG_TENSOR) {
    const auto t = p.singles.find(arg.name);
    (t == p.singles.end() ? seen.absent : seen.present) = true;
    if (t != p.singles.end()) look_at_tensor(seen, *t->second, p);
  } else if (arg.type == TE_FL_ARG_TENSOR_LIST) {
    const auto list = p.lists.find(arg.name);
    const bool empty = list == p.lists.end() || list->second.empty();
    (empty ? seen.absent : seen.present) = true;
    if (!empty)
      for (const Tensor* t : list->second) look_at_tensor(seen, *t, p);
  } else if (arg.type == TE_FL_ARG_SAVED) {
    (p.saved_storage >= 0 ? seen.present : seen.absent) = true;
  } else if (arg.type == TE_FL_ARG_COMMUNICATOR) {
    seen.values.insert(p.ranks);
  } else if (arg.type == TE_FL_ARG_I64_LIST) {
    for (const int64_t n : p.number_lists.at(arg.name)) seen.values.insert(static_cast<double>(n));
  } else {
    const auto value = p.scalars.find(arg.name);
    seen.values.insert(value == p.scalars.end() ? arg.neutral : value->second);
  }
}

int words(const char* text) {
  std::istringstream stream(text);
  int n = 0;
  for (std::string word; stream >> word;) ++n;
  return n;
}

void report_tensor(const te_fl_arg_desc& arg, const Seen& seen, const std::string& at,
                   std::vector<std::string>& missing) {
  for (int d = 0; d < TE_FL_DTYPE_COUNT; ++d)
    if ((arg.dtypes >> d & 1) != 0 && seen.dtypes.count(d) == 0)
      missing.push_back(at + " dtype " + name_of(d));
  for (int s = 0; s < TE_FL_SCALING_COUNT; ++s)
    if ((arg.scalings >> s & 1) != 0 && seen.scalings.count(s) == 0)
      missing.push_back(at + " scaling " + std::to_string(s));
  if (arg.aliases == nullptr) return;
  std::istringstream stream(arg.aliases);
  for (std::string input; stream >> input;)
    if (seen.aliased.count(input) == 0) missing.push_back(at + " in the memory of " + input);
}

void report(const te_fl_arg_desc& arg, const Seen& seen, const std::string& at,
            std::vector<std::string>& missing) {
  const bool optional = (arg.flags & TE_FL_ARG_OPTIONAL) != 0;
  switch (arg.type) {
    case TE_FL_ARG_TENSOR:
    case TE_FL_ARG_TENSOR_LIST:
      report_tensor(arg, seen, at, missing);
      [[fallthrough]];
    case TE_FL_ARG_SAVED:
      if (!seen.present) missing.push_back(at + " given");
      if ((optional || arg.type == TE_FL_ARG_TENSOR_LIST) && !seen.absent)
        missing.push_back(at + " left out or empty");
      return;
    case TE_FL_ARG_BOOL:
    case TE_FL_ARG_ENUM:
      for (int v = 0; v < (arg.type == TE_FL_ARG_BOOL ? 2 : words(arg.enum_names)); ++v)
        if (seen.values.count(v) == 0) missing.push_back(at + " = " + std::to_string(v));
      return;
    default:
      if (seen.values.size() < 2) missing.push_back(at + " with two values");
  }
}

}  // namespace

std::vector<std::string> uncovered(const Table& table) {
  std::map<std::string, std::vector<const Case*>> by_op;
  for (const Case& c : table) by_op[c.op].push_back(&c);
  std::vector<std::string> missing;
  const OpRegistry& registry = OpManager::instance().registry();
  for (const std::string& op : registry.op_names()) {
    if (op.find("::") != std::string::npos) continue;
    const auto id = registry.find(op);
    const te_fl_op_schema& schema = *registry.schema(*id);
    std::vector<Seen> seen(schema.arg_count);
    for (const Case* c : by_op[op]) {
      Problem p(c->op, c->seed);
      p.ranks = c->ranks, p.fills = false;
      c->build(p);
      for (uint32_t i = 0; i < schema.arg_count; ++i) look_at(*schema.args[i], p, seen[i]);
    }
    if (by_op[op].empty()) missing.push_back(op + ": no case");
    for (uint32_t i = 0; i < schema.arg_count && !by_op[op].empty(); ++i)
      report(*schema.args[i], seen[i], op + "." + schema.args[i]->name, missing);
  }
  return missing;
}

}  // namespace te_fl::conformance
