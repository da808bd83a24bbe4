// Cases with NaN and infinities for all ops whose formula defines the result (docs/numerics.md).
// They are made from the smallest existing cases: the special values are written into the inputs
// before the oracle runs.
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

// True for ops that are excluded here; the comments give the reasons.
bool has_own(const Case& c) {
  // Quantisation, copies, scale updates and list norms have cases with special values in their own
  // files.
  if (c.family == "quantize" || begins(c.op, "multi_tensor_")) return c.op != "multi_tensor_adam";
  // Routers: the effect of a NaN among the scores of unselected experts depends on the order of
  // operations.
  if (begins(c.op, "fused_topk_") || begins(c.op, "fused_score_")) return true;
  // Attention: the effect of a masked NaN is undefined, since a library may multiply it by zero.
  return c.family == "attention" || c.op == "strided_copy";
}

// True for derivatives that are zero below a threshold. For NaN inputs, 0 times NaN may give NaN or
// zero, depending on the implementation.
bool is_stepped(const std::string& op) {
  return op.find("drelu") != std::string::npos || op.find("dsrelu") != std::string::npos ||
         op.find("dreglu") != std::string::npos || op.find("dsreglu") != std::string::npos ||
         op.find("clamped_dswiglu") != std::string::npos;
}

bool takes_special(const Tensor& t) {
  const int dtype = t.spec.dtype;
  const bool plain = dtype == TE_FL_F32 || dtype == TE_FL_F16 || dtype == TE_FL_BF16;
  // The two columns of a rotated pair have one angle, which an op may read from either.
  const bool angles = t.name.find("freqs") != std::string::npos;
  return t.role == Role::kIn && !t.spec.quantised() && plain && !angles && t.numel() >= 8;
}

std::vector<Tensor*> inputs_of(Problem& p) {
  std::vector<Tensor*> inputs;
  for (const auto& t : p.tensors)
    if (takes_special(*t)) inputs.push_back(t.get());
  return inputs;
}

// Puts one NaN into each input, at different places, so that their effects do not overlap.
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

// Puts an infinity into the last element of the first input.
void strew_infinity(Problem& p) {
  Tensor& t = *inputs_of(p).front();
  t.put(t.numel() - 1, infinity());
  t.data->freeze();
}

// True for ops whose formula, evaluated term by term in any order, gives the limit at +infinity.
bool has_limit(const std::string& op) {
  static const std::set<std::string> ops = {"gelu", "qgelu", "relu",         "srelu",
                                            "silu", "add",   "embedding_fwd"};
  return ops.count(op) != 0;
}

// The properties by which cases are selected.
struct Kind {
  int input = -1;          // dtype of the first input that allows special values; -1: none
  int out = TE_FL_F32;     // dtype of the quantised output, if any
  bool quantised = false;  // true if an output is quantised
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
  // MXFP8 and NVFP4 have no scale for a block that contains a NaN.
  for (const auto& t : p.tensors)
    if (t->spec.scaling == TE_FL_SCALING_MXFP8 || t->spec.scaling == TE_FL_SCALING_NVFP4)
      return kind;
  if (!inputs.empty()) kind.input = inputs.front()->spec.dtype;
  return kind;
}

}  // namespace

void put_special_values(Table& sweep) {
  for (Case& c : sweep) {
    const bool many_rows = c.name.find("/70003x") != std::string::npos,
               long_rows = c.name.find("x70001/") != std::string::npos;
    if (!c.large || (!many_rows && !long_rows) || has_own(c)) continue;
    const Kind kind = kind_of(c);
    if (kind.input < 0 || kind.quantised) continue;
    const bool infinite = has_limit(c.op);
    c.name += infinite ? "/nan/infinity" : "/nan";
    c.build = [build = c.build, infinite](Problem& p) {
      build(p);
      strew_nan(p);
      if (infinite) strew_infinity(p);
    };
  }
}

void add_special_cases(Table& table) {
  constexpr int kMost = 12;  // limit of cases examined per op, without those of the usual shape
  Table made;
  std::set<std::string> taken;           // op and kind
  std::map<std::string, int> looked_at;  // number of cases per op
  for (const Case& c : table) {
    if (c.large || c.ranks != 0 || has_own(c)) continue;
    if (c.name.find("1021x1021") != std::string::npos) continue;  // allocating it takes long
    // The cases of the first kinds occur early in an op's list.
    if (taken.count(c.op + " f32") != 0 && taken.count(c.op + " bf16") != 0 &&
        taken.count(c.op + " codes") != 0)
      continue;
    // The kind of a case is known only after building it, but its name shows if its tensors are
    // small.
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
