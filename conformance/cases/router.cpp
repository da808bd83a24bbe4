#include "conformance/huge/router.hpp"
#include "conformance/case_file.hpp"
#include "conformance/compare.hpp"
#include "conformance/drawn.hpp"
#include "conformance/oracle_router.hpp"
#include "te_fl/ops/moe.h"

namespace te_fl::conformance {
namespace {

constexpr int kHigh[] = {TE_FL_F32, TE_FL_F16, TE_FL_BF16};
constexpr int kSigmoid = TE_FL_SCORE_FUNCTION_SIGMOID, kSoftmax = TE_FL_SCORE_FUNCTION_SOFTMAX,
              kRoot = TE_FL_SCORE_FUNCTION_SQRTSOFTPLUS;
constexpr const char* kFunctions[] = {"sigmoid", "softmax", "sqrtsoftplus"};

struct RouterVariant {
  RouterOptions options = {};
  int dtype = TE_FL_F32, map = TE_FL_BOOL, index = TE_FL_I32;
  Dims shape = {};  // the tokens' extents
  int64_t experts = 33;
  bool bias = false, has_map = true, has_bits = true, has_indices = true;
  bool ties = false;  // logits are a few different integers
  int64_t nan_at = -1;
  int shift = 0;  // added to the logits; not 0: all experts are chosen
};

std::string router_name(const RouterVariant& v) {
  const RouterOptions& o = v.options;
  std::string name = std::string(kFunctions[o.function]) + "/" + name_of(v.dtype) + "/" +
                     dims_name(v.shape) + "/E=" + std::to_string(v.experts) +
                     "/top=" + std::to_string(o.topk);
  if (o.before) name += "/before";
  if (o.groups > 0) {
    name += "/groups=" + std::to_string(o.groups) + "." + std::to_string(o.group_topk);
  }
  if (v.bias) name += "/bias";
  if (o.scaling != 1) name += "/scaled";
  name += std::string("/") + (v.has_map ? name_of(v.map) : "-") + (v.has_bits ? ".bits" : "") +
          (v.has_indices ? std::string(".") + name_of(v.index) : std::string());
  if (v.ties) name += "/ties";
  if (v.nan_at >= 0) name += "/nan_at=" + std::to_string(v.nan_at);
  if (v.shift != 0) name += "/shift=" + std::to_string(v.shift);
  return name;
}

Dims with(Dims d, int64_t last) {
  d.push_back(last);
  return d;
}
int64_t tokens_of(const Dims& d) {
  int64_t n = 1;
  for (int64_t x : d) n *= x;
  return n;
}
Numbers read_row(const Tensor* t, int64_t row, int64_t cols) {
  Numbers x;
  for (int64_t c = 0; c < cols; ++c) x.push_back(t->get(row * cols + c));
  return x;
}

void set_options(Problem& p, const RouterOptions& o, bool forward) {
  p.set("topk", static_cast<double>(o.topk)), p.set("score_function", o.function);
  p.set("use_pre_softmax", o.before), p.set("scaling_factor", o.scaling);
  if (!forward) return;
  p.set("num_groups", static_cast<double>(o.groups));
  p.set("group_topk", static_cast<double>(o.group_topk));
}

Fill make_logits(const RouterVariant& v) {
  return [v](Random& r, int64_t i) {
    if (v.nan_at >= 0 && i % v.experts == v.nan_at && i / v.experts % 2 == 0) return nan_value();
    return v.ties ? static_cast<double>(r.below(3)) - 1 : v.shift + 2 * r.gaussian();
  };
}

// The outputs that represent the chosen experts.
struct ChoiceOutputs {
  Tensor *map = nullptr, *bits = nullptr, *indices = nullptr;
  Numbers want_map, want_bits, want_indices;
  std::vector<uint8_t> skip_map, skip_bits, skip_indices;

  void add(const std::vector<int64_t>& chosen, int64_t experts, bool unclear) {
    const size_t before = want_map.size(), bytes = want_bits.size();
    want_map.resize(before + static_cast<size_t>(experts), 0);
    want_bits.resize(bytes + static_cast<size_t>((experts + 7) / 8), 0);
    for (int64_t e : chosen) {
      want_map[before + static_cast<size_t>(e)] = 1;
      want_bits[bytes + static_cast<size_t>(e / 8)] += static_cast<double>(1 << e % 8);
      want_indices.push_back(static_cast<double>(e));
    }
    skip_map.resize(want_map.size(), unclear), skip_bits.resize(want_bits.size(), unclear);
    skip_indices.resize(want_indices.size(), unclear);
  }
  void expect(Problem& p) {
    const auto one = [&p](Tensor* t, const Numbers& want, const std::vector<uint8_t>& skip) {
      if (t != nullptr) p.expect_exact(t, want, TE_FL_F32).skip = skip;
    };
    one(map, want_map, skip_map), one(bits, want_bits, skip_bits);
    one(indices, want_indices, skip_indices);
  }
};

void router_forward(Problem& p, const RouterVariant& v) {
  const Dims all = with(v.shape, v.experts);
  Tensor* x = p.in("logits", v.dtype, all, make_logits(v));
  Tensor* bias = v.bias ? p.in("expert_bias", TE_FL_F32, {v.experts}, gaussian(0.3)) : nullptr;
  Tensor* probs = p.out("probs", v.dtype, all);
  auto choice = std::make_shared<ChoiceOutputs>();
  if (v.has_map) choice->map = p.out("routing_map", v.map, all);
  if (v.has_bits) {
    choice->bits = p.out("routing_bits", TE_FL_U8, with(v.shape, (v.experts + 7) / 8));
  }
  if (v.has_indices)
    choice->indices = p.out("topk_indices", v.index, with(v.shape, v.options.topk));
  Tensor* saved = p.out("intermediate_output", TE_FL_F32, all);
  set_options(p, v.options, true);
  p.oracle([&p, v, x, bias, probs, choice, saved] {
    const Numbers b = bias != nullptr ? bias->values() : Numbers();
    Numbers want, want_saved;
    std::vector<uint8_t> skip, skip_saved;
    const bool after = v.options.function == kSoftmax && !v.options.before;
    for (int64_t t = 0; t < tokens_of(v.shape); ++t) {
      const Routed r = route(read_row(x, t, v.experts), b, v.options);
      want.insert(want.end(), r.probs.begin(), r.probs.end());
      want_saved.insert(want_saved.end(), r.saved.begin(), r.saved.end());
      const bool unclear = r.unclear && v.shift == 0;
      skip.resize(want.size(), unclear), skip_saved.resize(want.size(), unclear && after);
      choice->add(r.chosen, v.experts, unclear);
    }
    p.expect(probs, want).skip = skip;
    p.expect(saved, want_saved).skip = skip_saved;
    choice->expect(p);
  });
}

// Draws random experts for each row; returns one byte per expert. `indices` receives the same
// choice in the form that the forward saves.
std::vector<uint8_t> draw_choice(Random& r, const RouterVariant& v, std::vector<double>& indices) {
  std::vector<uint8_t> map(static_cast<size_t>(tokens_of(v.shape) * v.experts), 0);
  for (int64_t t = 0; t < tokens_of(v.shape); ++t)
    for (int64_t k = 0; k < v.options.topk;) {
      const int64_t e = r.below(v.experts);
      uint8_t& mine = map[t * v.experts + e];
      if (mine != 0) continue;
      mine = 1, ++k;
      indices.push_back(static_cast<double>(e));
    }
  return map;
}

void router_backward(Problem& p, const RouterVariant& v, bool in_place = false,
                     double bad_index = 0) {
  const Dims all = with(v.shape, v.experts);
  const RouterOptions& o = v.options;
  std::vector<double> indices;
  const std::vector<uint8_t> map = draw_choice(p.random, v, indices);
  if (bad_index != 0) indices[2] = bad_index;
  if (v.has_map) {
    p.in("routing_map", v.map, all,
         [map](Random&, int64_t i) { return static_cast<double>(map[i]); });
  }
  if (v.has_bits) {
    const int64_t bytes = (v.experts + 7) / 8;
    p.in("routing_bits", TE_FL_U8, with(v.shape, bytes), [=](Random&, int64_t i) {
      double byte = 0;
      for (int64_t e = i % bytes * 8; e < std::min(v.experts, i % bytes * 8 + 8); ++e)
        byte += map[i / bytes * v.experts + e] << e % 8;
      return byte;
    });
  }
  if (v.has_indices) {
    p.in("topk_indices", v.index, with(v.shape, o.topk),
         [indices](Random&, int64_t i) { return indices[i]; });
  }
  const bool after = o.function == kSoftmax && !o.before;
  Tensor* saved = p.in("intermediate_output", TE_FL_F32, all, [=](Random& r, int64_t i) {
    if (o.function == kRoot) return v.shift + 2 * r.gaussian();
    const double drawn = r.uniform();
    return after && map[i] == 0 ? -infinity() : drawn;
  });
  Tensor* dy = p.in("grad_probs", v.dtype, all);
  Tensor* dx = in_place ? p.in_place("grad_logits", dy) : p.out("grad_logits", v.dtype, all);
  set_options(p, o, false);
  if (bad_index != 0) {
    p.expect_error(TE_FL_INVALID_ARGUMENT,
                   "topk_indices[2] is " + std::to_string(static_cast<int64_t>(bad_index)));
    p.late_error = true;
  }
  p.oracle([&p, v, o, map, saved, dy, dx, bad_index] {
    if (bad_index != 0) return p.expect_unchanged(dx);
    Numbers want, tolerance;
    for (int64_t t = 0; t < tokens_of(v.shape); ++t) {
      Numbers g = read_row(dy, t, v.experts);
      std::vector<uint8_t> counts(map.begin() + t * v.experts, map.begin() + (t + 1) * v.experts);
      for (int64_t e = 0; e < v.experts; ++e) g[e] = counts[e] != 0 ? g[e] * o.scaling : 0;
      if (o.before) counts.assign(counts.size(), 1);
      const RowGradient r = score_gradient(g, read_row(saved, t, v.experts), counts, o.function,
                                           o.topk > 1 && o.function != kSoftmax);
      want.insert(want.end(), r.value.begin(), r.value.end());
      for (double size : r.size) tolerance.push_back(4e-6 * size);
    }
    p.expect(dx, want, tolerance);
  });
}

std::vector<RouterVariant> router_variants() {
  std::vector<RouterVariant> all;
  const auto kinds = [&](RouterVariant v) {
    for (int function : {kSigmoid, kSoftmax, kRoot}) {
      v.options.function = function, v.options.before = false;
      all.push_back(v);
    }
    v.options.function = kSoftmax, v.options.before = true;
    all.push_back(v);
  };
  for (int dtype : kHigh) kinds({.dtype = dtype, .shape = {7}});
  kinds({.options = {.topk = 1}, .dtype = TE_FL_BF16, .shape = {2, 3}, .experts = 8});
  kinds({.options = {.topk = 8, .scaling = 2.5}, .map = TE_FL_U8, .shape = {9}, .experts = 256});
  kinds(
      {.options = {.topk = 3}, .index = TE_FL_I64, .shape = {5}, .experts = 128, .has_map = false});
  kinds(
      {.options = {.topk = 5}, .index = TE_FL_I16, .shape = {5}, .experts = 64, .has_bits = false});
  kinds({.options = {.topk = 20}, .shape = {6}, .experts = 300, .has_indices = false});
  kinds({.options = {.topk = 4}, .shape = {6}, .experts = 4});
  kinds({.options = {.topk = 1}, .shape = {3}, .experts = 1});
  kinds({.options = {.topk = 6}, .shape = {3}, .experts = 1000});
  kinds({.options = {.topk = 6}, .shape = {3}, .experts = 1500});
  // Several tokens per warp, with multiples of eight experts and other numbers.
  kinds({.options = {.topk = 2}, .shape = {300}, .experts = 8});
  kinds({.options = {.topk = 3}, .dtype = TE_FL_BF16, .shape = {37}, .experts = 12});
  kinds({.options = {.topk = 2}, .dtype = TE_FL_F16, .shape = {21}, .experts = 16});
  kinds({.options = {.topk = 10}, .shape = {5}, .experts = 512});
  kinds({.shape = {0}}), kinds({.shape = {}});
  kinds({.options = {.topk = 8}, .shape = {40}, .experts = 64, .ties = true});
  // Logits x for which exp(x) or its square root is near the limits of FP32's range.
  for (int shift : {-20, -80, -88, -100, -150, -300, 100})
    for (int dtype : {TE_FL_F32, TE_FL_BF16})
      kinds({.options = {.topk = 12},
             .dtype = dtype,
             .shape = {7},
             .experts = 12,
             .has_indices = false,
             .shift = shift});
  return all;
}

void mistake(Table& table, const std::string& name, const RouterVariant& v, const std::string& text,
             int64_t more_bits = 0) {
  add(table, "moe", "fused_topk_with_score_function_fwd", "mistake/" + name, [=](Problem& p) {
    const Dims all = with(v.shape, v.experts);
    p.in("logits", TE_FL_F32, all);
    Tensor* y = p.out("probs", TE_FL_F32, all);
    p.out("intermediate_output", TE_FL_F32, all);
    p.out("routing_bits", TE_FL_U8, with(v.shape, (v.experts + 7) / 8 + more_bits));
    set_options(p, v.options, true);
    p.expect_error(TE_FL_INVALID_ARGUMENT, text);
    p.oracle([&p, y] { p.expect_unchanged(y); });
  });
}

void add_router_ops(Table& table) {
  const char* forward = "fused_topk_with_score_function_fwd";
  const char* backward = "fused_topk_with_score_function_bwd";
  for (const RouterVariant& v : router_variants()) {
    add(table, "moe", forward, router_name(v), [v](Problem& p) { router_forward(p, v); });
    if (v.ties) continue;
    add(table, "moe", backward, router_name(v), [v](Problem& p) { router_backward(p, v); });
  }
  std::vector<RouterVariant> more;
  for (int function : {kSigmoid, kRoot})
    for (int dtype : {TE_FL_F32, TE_FL_BF16}) {
      more.push_back({.options = {.function = function, .topk = 4},
                      .dtype = dtype,
                      .shape = {9},
                      .experts = 64,
                      .bias = true});
      more.push_back({.options = {.function = function, .topk = 8, .groups = 8, .group_topk = 4},
                      .dtype = dtype,
                      .shape = {19},
                      .experts = 256,
                      .bias = true});
      more.push_back({.options = {.function = function, .topk = 5, .groups = 5, .group_topk = 2},
                      .dtype = dtype,
                      .shape = {19},
                      .experts = 45,
                      .ties = true});
    }
  more.push_back({.options = {.function = kSigmoid, .topk = 2, .groups = 4, .group_topk = 1},
                  .shape = {21},
                  .experts = 16,
                  .bias = true});
  for (bool before : {true, false})
    more.push_back({.options = {kSoftmax, before, 6, 4, 2}, .shape = {9}, .experts = 32});
  for (int64_t at : {0, 5, 32})
    for (int function : {kSigmoid, kSoftmax, kRoot})
      more.push_back({.options = {.function = function, .topk = 3}, .shape = {4}, .nan_at = at});
  more.push_back({.options = {.function = kSoftmax}, .shape = {9}, .experts = 8, .nan_at = 5});
  for (const RouterVariant& v : more)
    add(table, "moe", forward, router_name(v), [v](Problem& p) { router_forward(p, v); });
  for (const bool bits : {true, false}) {
    RouterVariant v{.options = {.function = kSigmoid},
                    .shape = {7},
                    .has_map = false,
                    .has_bits = bits,
                    .has_indices = !bits};
    for (int index : {TE_FL_I16, TE_FL_I32, TE_FL_I64}) {
      v.index = index;
      if (bits && index != TE_FL_I16) continue;
      add(table, "moe", backward, "one/" + router_name(v),
          [v](Problem& p) { router_backward(p, v); });
    }
  }
  const RouterVariant listed{
      .options = {.topk = 2}, .shape = {7}, .has_map = false, .has_bits = false};
  add(table, "moe", backward, "in_place/" + router_name(listed),
      [listed](Problem& p) { router_backward(p, listed, true); });
  for (double bad : {33.0, -1.0})
    add(table, "moe", backward, "mistake/index=" + std::to_string(static_cast<int64_t>(bad)),
        [=](Problem& p) { router_backward(p, listed, false, bad); });
  mistake(table, "topk", {.options = {.topk = 9}, .shape = {3}, .experts = 8},
          "'topk' is 9, E is 8 (in 'logits')");
  mistake(table, "groups",
          {.options = {.topk = 2, .groups = 3, .group_topk = 1}, .shape = {3}, .experts = 8},
          "groups have equally many experts");
  mistake(table, "group_topk",
          {.options = {.topk = 5, .groups = 4, .group_topk = 2}, .shape = {3}, .experts = 8},
          "the chosen groups have topk experts");
  add(table, "moe", forward, "mistake/index_of_16_bits", [](Problem& p) {
    p.in("logits", TE_FL_F32, {2, 40000});
    Tensor* y = p.out("probs", TE_FL_F32, {2, 40000});
    p.out("intermediate_output", TE_FL_F32, {2, 40000});
    p.out("topk_indices", TE_FL_I16, {2, 3}), p.set("topk", 3);
    p.expect_error(TE_FL_INVALID_ARGUMENT, "i16 numbers 32768 experts");
    p.oracle([&p, y] { p.expect_unchanged(y); });
  });
  RouterVariant most{.options = {.topk = 3}, .index = TE_FL_I16, .shape = {2}, .experts = 32768};
  add(table, "moe", forward, router_name(most), [most](Problem& p) { router_forward(p, most); });
  mistake(table, "bits", {.shape = {3}, .experts = 8}, "a bit for each expert", 1);
  add(table, "moe", backward, "mistake/no_choice", [](Problem& p) {
    p.in("intermediate_output", TE_FL_F32, {3, 4}), p.in("grad_probs", TE_FL_F32, {3, 4});
    Tensor* dx = p.out("grad_logits", TE_FL_F32, {3, 4});
    p.expect_error(TE_FL_INVALID_ARGUMENT, "they say which experts were chosen");
    p.oracle([&p, dx] { p.expect_unchanged(dx); });
  });
}

// ---- cases of the scores for the auxiliary loss

void score_forward(Problem& p, const RouterVariant& v) {
  const Dims all = with(v.shape, v.experts);
  Tensor* x = p.in("logits", v.dtype, all, make_logits(v));
  Tensor* scores = p.out("scores", TE_FL_F32, all);
  auto choice = std::make_shared<ChoiceOutputs>();
  if (v.has_map) choice->map = p.out("routing_map", v.map, all);
  if (v.has_bits) {
    choice->bits = p.out("routing_bits", TE_FL_U8, with(v.shape, (v.experts + 7) / 8));
  }
  Tensor* saved = p.out("intermediate_output", TE_FL_F32, all);
  p.set("topk", static_cast<double>(v.options.topk));
  p.set("score_function", v.options.function);
  p.oracle([&p, v, x, scores, choice, saved] {
    Numbers want, want_saved;
    for (int64_t t = 0; t < tokens_of(v.shape); ++t) {
      const Numbers logits = read_row(x, t, v.experts);
      Numbers s = compute_scores(logits, v.options.function);
      const Numbers& kept = v.options.function == kRoot ? logits : s;
      want_saved.insert(want_saved.end(), kept.begin(), kept.end());
      if (v.options.function != kSoftmax) {
        double sum = 1e-20;
        for (double value : s) sum += value;
        for (double& value : s) value /= sum;
      }
      want.insert(want.end(), s.begin(), s.end());
      Picker picker;
      const std::vector<int64_t> chosen = picker.pick(s, up_to(0, v.experts), v.options.topk);
      choice->add(chosen, v.experts, picker.unclear && v.shift == 0);
    }
    p.expect(scores, want), p.expect(saved, want_saved);
    choice->expect(p);
  });
}

void score_backward(Problem& p, const RouterVariant& v) {
  const Dims all = with(v.shape, v.experts);
  Tensor* saved = p.in("intermediate_output", TE_FL_F32, all, [=](Random& r, int64_t) {
    return v.options.function == kRoot ? v.shift + 2 * r.gaussian() : r.uniform();
  });
  Tensor* dy = p.in("grad_scores", TE_FL_F32, all);
  Tensor* dx = p.out("grad_logits", v.dtype, all);
  p.set("topk", static_cast<double>(v.options.topk));
  p.set("score_function", v.options.function);
  p.oracle([&p, v, saved, dy, dx] {
    Numbers want, tolerance;
    const std::vector<uint8_t> counts(static_cast<size_t>(v.experts), 1);
    for (int64_t t = 0; t < tokens_of(v.shape); ++t) {
      const RowGradient r =
          score_gradient(read_row(dy, t, v.experts), read_row(saved, t, v.experts), counts,
                         v.options.function, v.options.function != kSoftmax);
      want.insert(want.end(), r.value.begin(), r.value.end());
      for (double size : r.size) tolerance.push_back(4e-6 * size);
    }
    p.expect(dx, want, tolerance);
  });
}

void add_scores(Table& table) {
  for (RouterVariant v : router_variants()) {
    v.has_indices = false, v.options.scaling = 1;
    if (v.options.before) continue;
    add(table, "moe", "fused_score_for_moe_aux_loss_fwd", router_name(v),
        [v](Problem& p) { score_forward(p, v); });
    v.has_map = v.has_bits = false;
    add(table, "moe", "fused_score_for_moe_aux_loss_bwd", router_name(v),
        [v](Problem& p) { score_backward(p, v); });
  }
}

// ---- cases of the auxiliary loss

struct LossVariant {
  int dtype = TE_FL_F32, count = TE_FL_I32;
  int64_t tokens = 7, experts = 33;
  bool in_tensor = false;
};
std::string loss_name(const LossVariant& v) {
  return std::string(name_of(v.dtype)) + "/" + name_of(v.count) + "/" +
         dims_name({v.tokens, v.experts}) + (v.in_tensor ? "/in_tensor" : "");
}
Tensor* counts_in(Problem& p, const LossVariant& v) {
  return p.in("tokens_per_expert", v.count, {v.experts}, integers(100));
}

void loss_forward(Problem& p, const LossVariant& v) {
  Tensor* x =
      p.in("probs", v.dtype, {v.tokens, v.experts}, [](Random& r, int64_t) { return r.uniform(); });
  Tensor* counts = counts_in(p, v);
  Tensor* loss = p.out("aux_loss", v.dtype, {});
  Tensor* c = p.out("const_buf", TE_FL_F32, {1});
  if (v.in_tensor) {
    p.in("total_num_tokens_tensor", TE_FL_I64, {}, constant(777));
  } else {
    p.set("total_num_tokens", 777);
  }
  p.set("num_experts", 40), p.set("topk", 3), p.set("coeff", 0.5);
  p.oracle([&p, v, x, counts, loss, c] {
    const double factor = 0.5 * 40 / (3.0 * 777 * 777);
    double sum = 0;
    for (int64_t i = 0; i < x->numel(); ++i) sum += x->get(i) * counts->get(i % v.experts);
    p.expect(c, {factor});
    p.expect(loss, {factor * sum},
             {sum_tolerance(static_cast<double>(x->numel()), std::fabs(factor * sum))});
  });
}

void loss_backward(Problem& p, const LossVariant& v) {
  Tensor* c = p.in("const_buf", TE_FL_F32, {1}, constant(0.3f));
  Tensor* counts = counts_in(p, v);
  Tensor* dy = p.in("grad_aux_loss", v.dtype, {});
  Tensor* dx = p.out("grad_probs", v.dtype, {v.tokens, v.experts});
  p.oracle([&p, v, c, counts, dy, dx] {
    Numbers want;
    for (int64_t i = 0; i < dx->numel(); ++i)
      want.push_back(c->get(0) * counts->get(i % v.experts) * dy->get(0));
    p.expect(dx, want);
  });
}

void add_losses(Table& table) {
  std::vector<LossVariant> all;
  for (int dtype : kHigh)
    for (int count : {TE_FL_I32, TE_FL_I64, TE_FL_F32, TE_FL_BF16}) all.push_back({dtype, count});
  for (int64_t experts : {1, 8, 64, 256, 1500}) all.push_back({.tokens = 600, .experts = experts});
  all.push_back({.tokens = 0}), all.push_back({.dtype = TE_FL_BF16, .in_tensor = true});
  for (const LossVariant& v : all) {
    add(table, "moe", "fused_moe_aux_loss_fwd", loss_name(v),
        [v](Problem& p) { loss_forward(p, v); });
    if (v.in_tensor) continue;
    add(table, "moe", "fused_moe_aux_loss_bwd", loss_name(v),
        [v](Problem& p) { loss_backward(p, v); });
  }
  add(table, "moe", "fused_moe_aux_loss_fwd", "mistake/no_total", [](Problem& p) {
    p.in("probs", TE_FL_F32, {3, 4}), p.in("tokens_per_expert", TE_FL_I32, {4}, integers(9));
    Tensor* loss = p.out("aux_loss", TE_FL_F32, {});
    p.out("const_buf", TE_FL_F32, {1});
    p.expect_error(TE_FL_INVALID_ARGUMENT, "'total_num_tokens' is 0");
    p.oracle([&p, loss] { p.expect_unchanged(loss); });
  });
}

void add_cases(Table& table) {
  add_router_ops(table);
  add_scores(table);
  add_losses(table);
}

void draw_cases(Drawn& drawn) {
  const auto variant = [](Draw& r) {
    Dims shape = Drawn::shape(r, 2);
    RouterVariant v{.dtype = Drawn::high(r), .experts = shape.back()};
    shape.pop_back();
    v.shape = shape;
    v.options.function = static_cast<int>(r.below(3));
    v.options.topk = 1 + r.below(std::min<int64_t>(v.experts, 12));
    v.options.before = v.options.function == kSoftmax && Drawn::chance(r, 2);
    v.bias = v.options.function != kSoftmax && Drawn::chance(r, 2);
    v.ties = Drawn::chance(r, 3);
    if (Drawn::chance(r, 3)) v.options.scaling = 2.5;
    static constexpr int kIndices[] = {TE_FL_I16, TE_FL_I32, TE_FL_I64};
    v.map = Drawn::chance(r, 2) ? TE_FL_BOOL : TE_FL_U8, v.index = kIndices[r.below(3)];
    if (v.experts > 32767) v.index = TE_FL_I32;
    const int64_t kept = r.below(4);  // three of them, or one alone
    v.has_map = kept != 0 && kept != 1, v.has_bits = kept != 0 && kept != 2;
    v.has_indices = kept != 3;
    return v;
  };
  drawn.cases("moe", "fused_topk_with_score_function_fwd", [&](Draw& r) -> DrawnCase {
    RouterVariant v = variant(r);
    if (Drawn::chance(r, 3) && v.experts % 4 == 0) {
      v.options.groups = 4, v.options.group_topk = 2;
      v.options.topk = std::min(v.options.topk, v.experts / 2);
    }
    return {router_name(v), [v](Problem& p) { router_forward(p, v); }};
  });
  drawn.cases("moe", "fused_topk_with_score_function_bwd", [&](Draw& r) -> DrawnCase {
    const RouterVariant v = variant(r);
    return {router_name(v), [v](Problem& p) { router_backward(p, v); }};
  });
  drawn.cases("moe", "fused_score_for_moe_aux_loss_fwd", [&](Draw& r) -> DrawnCase {
    RouterVariant v = variant(r);
    v.has_indices = false, v.options.scaling = 1, v.bias = v.options.before = false;
    return {router_name(v), [v](Problem& p) { score_forward(p, v); }};
  });
  drawn.cases("moe", "fused_score_for_moe_aux_loss_bwd", [&](Draw& r) -> DrawnCase {
    RouterVariant v = variant(r);
    v.has_map = v.has_bits = v.has_indices = v.bias = v.options.before = false;
    v.options.scaling = 1;
    return {router_name(v), [v](Problem& p) { score_backward(p, v); }};
  });
  const auto loss = [](Draw& r) {
    const Dims shape = Drawn::shape(r, 2);
    static constexpr int kCounts[] = {TE_FL_I32, TE_FL_I64, TE_FL_F32, TE_FL_BF16};
    return LossVariant{.dtype = Drawn::high(r),
                       .count = kCounts[r.below(4)],
                       .tokens = shape[0],
                       .experts = shape.back(),
                       .in_tensor = Drawn::chance(r, 3)};
  };
  drawn.cases("moe", "fused_moe_aux_loss_fwd", [&](Draw& r) -> DrawnCase {
    const LossVariant v = loss(r);
    return {loss_name(v), [v](Problem& p) { loss_forward(p, v); }};
  });
  drawn.cases("moe", "fused_moe_aux_loss_bwd", [&](Draw& r) -> DrawnCase {
    const LossVariant v = loss(r);
    return {loss_name(v), [v](Problem& p) { loss_backward(p, v); }};
  });
}

}  // namespace
}  // namespace te_fl::conformance

namespace te_fl::huge {
namespace {

void add_cases(Cases& cases) {
  using namespace router_calls;
  const Cases all = {
      {"fused_topk_with_score_function_fwd", "", [](Run& r) { choose(r, 256); }},
      {"fused_topk_with_score_function_fwd", "odd", [](Run& r) { choose(r, 61); }},
      {"fused_topk_with_score_function_bwd", "", [](Run& r) { choice_gradient(r, 256); }},
      {"fused_score_for_moe_aux_loss_fwd", "", [](Run& r) { scores(r, 256); }},
      {"fused_score_for_moe_aux_loss_bwd", "", [](Run& r) { scores_gradient(r, 256); }},
      {"fused_moe_aux_loss_fwd", "", [](Run& r) { loss(r, 256); }},
      {"fused_moe_aux_loss_fwd", "odd", [](Run& r) { loss(r, 61); }},
      {"fused_moe_aux_loss_bwd", "", [](Run& r) { loss_gradient(r, 256); }},
      {"fused_moe_aux_loss_bwd", "odd", [](Run& r) { loss_gradient(r, 61); }},
  };
  cases.insert(cases.end(), all.begin(), all.end());
}

}  // namespace
}  // namespace te_fl::huge

namespace te_fl::bench {
namespace {

void add_cases(Cases& cases) {
  const size_t first = cases.size();
  both_dtypes(cases, "fused_topk_with_score_function_fwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_fused_topk_with_score_function_fwd_args>();
    a.logits = c.in({rows, c.cols()}, dtype), a.probs = c.out({rows, c.cols()}, dtype);
    a.routing_map = c.out({rows, c.cols()}, TE_FL_U8);
    a.intermediate_output = c.out({rows, c.cols()}, TE_FL_F32), a.topk = 8;
  });
  both_dtypes(cases, "fused_topk_with_score_function_bwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_fused_topk_with_score_function_bwd_args>();
    a.routing_map = c.in({rows, c.cols()}, TE_FL_U8);
    a.intermediate_output = c.in({rows, c.cols()}, TE_FL_F32);
    a.grad_probs = c.in({rows, c.cols()}, dtype), a.grad_logits = c.out({rows, c.cols()}, dtype);
    a.topk = 8;
  });
  both_dtypes(cases, "fused_score_for_moe_aux_loss_fwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_fused_score_for_moe_aux_loss_fwd_args>();
    a.logits = c.in({rows, c.cols()}, dtype), a.scores = c.out({rows, c.cols()}, TE_FL_F32);
    a.routing_map = c.out({rows, c.cols()}, TE_FL_U8);
    a.intermediate_output = c.out({rows, c.cols()}, TE_FL_F32), a.topk = 8;
  });
  both_dtypes(cases, "fused_score_for_moe_aux_loss_bwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_fused_score_for_moe_aux_loss_bwd_args>();
    a.intermediate_output = c.in({rows, c.cols()}, TE_FL_F32);
    a.grad_scores = c.in({rows, c.cols()}, TE_FL_F32);
    a.grad_logits = c.out({rows, c.cols()}, dtype), a.topk = 8;
  });
  both_dtypes(cases, "fused_moe_aux_loss_fwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_fused_moe_aux_loss_fwd_args>();
    a.probs = c.in({rows, c.cols()}, dtype), a.tokens_per_expert = c.in({c.cols()}, TE_FL_F32);
    a.aux_loss = c.out({1}, dtype), a.const_buf = c.out({1}, TE_FL_F32), a.total_num_tokens = rows;
  });
  both_dtypes(cases, "fused_moe_aux_loss_bwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_fused_moe_aux_loss_bwd_args>();
    a.const_buf = c.in({1}, TE_FL_F32), a.tokens_per_expert = c.in({c.cols()}, TE_FL_F32);
    a.grad_aux_loss = c.in({1}, dtype), a.grad_probs = c.out({rows, c.cols()}, dtype);
  });
  describe(cases, first, "rows, experts", {16384, 256}, {131072, 256});
}

}  // namespace
}  // namespace te_fl::bench

namespace te_fl::conformance {

extern const CaseFile router_cases{
    .cases = add_cases, .drawn = draw_cases, .huge = huge::add_cases, .bench = bench::add_cases};

}  // namespace te_fl::conformance
