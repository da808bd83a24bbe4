// NaN and infinities in the inputs of every op whose formula says what comes out
// (docs/numerics.md): cases of the table, of the smallest kind, with such values strewn in before
// their oracles look.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <set>
#include <string>

#include "conformance/case.hpp"

namespace te_fl::conformance {
namespace {

bool begins(const std::string& text, const std::string& part) { return text.rfind(part, 0) == 0; }

// Ops that are left out, and where their special values are instead.
bool has_own(const Case& c) {
  // Rounding, copying, recurrences of scales and norms of lists list theirs in their own files.
  if (c.family == "quantize" || begins(c.op, "multi_tensor_")) return c.op != "multi_tensor_adam";
  // Routers: a NaN among scores that are not chosen counts or not, by the order of the products.
  if (begins(c.op, "fused_topk_") || begins(c.op, "fused_score_")) return true;
  // The effect of a NaN behind a mask is not fixed: a library may multiply it by a zero.
  return c.family == "attention" || c.op == "strided_copy";
}

// A derivative that is zero below a threshold: 0 times NaN is NaN for one, and zero for another.
bool is_stepped(const std::string& op) {
  return op.find("drelu") != std::string::npos || op.find("dsrelu") != std::string::npos ||
         op.find("dreglu") != std::string::npos || op.find("dsreglu") != std::string::npos ||
         op.find("clamped_dswiglu") != std::string::npos;
}

bool takes_special(const Tensor& t) {
  const int dtype = t.spec.dtype;
  const bool plain = dtype == TE_FL_F32 || dtype == TE_FL_F16 || dtype == TE_FL_BF16;
  return t.role == Role::kIn && !t.spec.quantised() && plain && t.numel() >= 8;
}

std::vector<Tensor*> inputs_of(Problem& p) {
  std::vector<Tensor*> inputs;
  for (const auto& t : p.tensors)
    if (takes_special(*t)) inputs.push_back(t.get());
  return inputs;
}

// One NaN in each input, each in a place of its own, so that none hides what became of another.
void strew_nan(Problem& p) {
  const std::vector<Tensor*> inputs = inputs_of(p);
  const bool stepped = is_stepped(p.op_name);
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensor& t = *inputs[i];
    if (stepped && t.name != "grad") {
      for (int64_t at = 0; at < t.numel(); ++at) t.put(at, 0.5 + std::fabs(t.get(at)) / 8);
    } else {
      const auto part = static_cast<int64_t>(i + 1),
                 parts = static_cast<int64_t>(inputs.size() + 1);
      t.put(t.numel() * part / parts, nan_value());
    }
    t.data->freeze();
  }
}

// An infinity in the first input's last element.
void strew_infinity(Problem& p) {
  Tensor& t = *inputs_of(p).front();
  t.put(t.numel() - 1, infinity());
  t.data->freeze();
}

// Ops whose limit at +infinity is what the formula computes, term by term, in any order.
bool has_limit(const std::string& op) {
  static const std::set<std::string> ops = {"gelu", "qgelu", "relu",         "srelu",
                                            "silu", "add",   "embedding_fwd"};
  return ops.count(op) != 0;
}

// Decides whether a case is of the wanted kind.
struct Kind {
  int input = -1;          // dtype of the first input that takes special values; -1: there is none
  int out = TE_FL_F32;     // of the quantised output, if there is one
  bool quantised = false;  // it has one
};
Kind kind_of(const Case& c) {
  Problem p(c.op, c.seed);
  p.fills = false;
  c.build(p);
  Kind kind;
  if (p.want_code != 0 || !p.may_refuse.empty() || p.late_error) return kind;
  const std::vector<Tensor*> inputs = inputs_of(p);
  for (const auto& t : p.tensors) {
    if (!t->strides.empty()) return kind;
    if (t->spec.quantised() && t->role == Role::kIn) return kind;
    if (t->spec.quantised()) kind.quantised = true, kind.out = t->spec.dtype;
  }
  // MXFP8 and NVFP4 have no code for what a block with a NaN is scaled by.
  for (const auto& t : p.tensors)
    if (t->spec.scaling == TE_FL_SCALING_MXFP8 || t->spec.scaling == TE_FL_SCALING_NVFP4)
      return kind;
  if (!inputs.empty()) kind.input = inputs.front()->spec.dtype;
  return kind;
}

}  // namespace

void add_special_cases(Table& table) {
  constexpr int kMost = 12;  // cases of an op are looked at beside those of the usual small shape
  Table made;
  std::set<std::string> taken;           // op and kind
  std::map<std::string, int> looked_at;  // cases of an op
  for (const Case& c : table) {
    if (c.large || c.ranks != 0 || has_own(c)) continue;
    if (c.name.find("1021x1021") != std::string::npos) continue;  // its memory alone takes long
    // Cases of the first kinds come early in an op's list.
    if (taken.count(c.op + " f32") != 0 && taken.count(c.op + " bf16") != 0 &&
        taken.count(c.op + " codes") != 0)
      continue;
    // Only building a case tells its kind; the name, whether its tensors are small.
    const bool small = c.name.find("/7x33") != std::string::npos,
               codes = c.name.find(".tensor.row") != std::string::npos;
    if (!small && !codes && ++looked_at[c.op] > kMost) continue;
    if (codes && (taken.count(c.op + " codes") != 0 || ++looked_at[c.op + " codes"] > 2)) continue;
    const Kind kind = kind_of(c);
    if (kind.input < 0) continue;
    const char* what = kind.quantised             ? kind.out == TE_FL_F8E4M3 ? " codes" : ""
                       : kind.input == TE_FL_F32  ? " f32"
                       : kind.input == TE_FL_BF16 ? " bf16"
                                                  : "";
    if (*what == '\0' || !taken.insert(c.op + what).second) continue;
    const std::string rest = c.name.substr(c.op.size() + 1);
    add(made, c.family, c.op, rest + "/nan", [build = c.build](Problem& p) {
      build(p);
      strew_nan(p);
    });
    if (kind.quantised || !has_limit(c.op)) continue;
    add(made, c.family, c.op, rest + "/infinity", [build = c.build](Problem& p) {
      build(p);
      strew_infinity(p);
    });
  }
  std::move(made.begin(), made.end(), std::back_inserter(table));
}

}  // namespace te_fl::conformance
