#include "fault.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "element.hpp"
#include "scaling.hpp"
#include "view.hpp"

namespace te_fl::mutants {
namespace {

using Tensors = std::vector<const te_fl_tensor*>;

size_t bytes_of(const te_fl_dltensor& t, int64_t elements) {
  return static_cast<size_t>((elements * t.dtype.bits + 7) / 8);
}

// Replaces tensor i of an argument by a compact copy. `dtype`: null keeps the element type.
te_fl_tensor& copied(MutableCall& call, const te_fl_arg_desc& arg, size_t i,
                     const te_fl_tensor& from) {
  te_fl_tensor to = from;
  const View source(from);
  if (!source.has_data()) return call.replace(arg, i, to);
  to.dl.data = call.memory(bytes_of(from.dl, source.elements()));
  to.dl.byte_offset = 0, to.dl.strides = nullptr;
  View target(to);
  for (int64_t n = 0; n < source.elements(); ++n) target.set_bits(n, source.bits(n));
  return call.replace(arg, i, to);
}

// The parts of a quantised tensor by name; the view has no data if the part is absent.
View part_of(const te_fl_tensor& t, const std::string& name) {
  if (t.quant == nullptr) return {};
  const te_fl_quant& q = *t.quant;
  const backend::Matrix m = backend::as_matrix(t);
  if (name == "columnwise_data")
    return {q.columnwise_data, dtype_index(t.dl.dtype), t.dl.dtype.bits, m.rows * m.cols};
  if (name == "amax") return {q.amax, TE_FL_F32, 32, 1};
  if (name == "columnwise_amax") return {q.columnwise_amax, TE_FL_F32, 32, 1};
  if (name == "scale") return {q.scale, TE_FL_F32, 32, 1};
  const bool columnwise = name == "columnwise_scale_inv";
  void* const data = columnwise ? q.columnwise_scale_inv : q.scale_inv;
  if (q.scaling == TE_FL_SCALING_TENSOR) return {data, TE_FL_F32, 32, 1};
  const reference::Extents e = reference::scale_extents(q.scaling, columnwise, m);
  if (q.scaling == TE_FL_SCALING_MXFP8) return {data, TE_FL_F8E8M0, 8, e.rows * e.cols};
  if (q.scaling == TE_FL_SCALING_NVFP4) return {data, TE_FL_F8E4M3, 8, e.rows * e.cols};
  return {data, TE_FL_F32, 32, e.rows * e.cols};
}

// The elements of a tensor; of a quantised one that has no row-wise copy, the column-wise codes.
View elements_of(const te_fl_tensor& t) {
  View plain(t);
  return plain.has_data() || t.quant == nullptr ? plain : part_of(t, "columnwise_data");
}

void spoil_input(View v, const std::string& kind, double number) {
  const auto from = static_cast<int64_t>(number);
  const int64_t n = v.elements();
  if (!v.has_data() || n == 0) return;
  if (kind == "last") return v.set_bits(n - 1, 0);
  if (kind == "rows") {
    for (int64_t i = from * v.columns(); i < n; ++i) v.set_bits(i, v.bits(i % v.columns()));
    return;
  }
  const double most =
      v.is_float() ? static_cast<double>(reference::largest_finite_of(v.dtype())) : 0;
  const double least = v.dtype() == TE_FL_F16 ? 0x1p-14 : 0x1p-126;
  for (int64_t i = kind == "from" || kind == "nan" ? from : 0; i < n; ++i) {
    const double x = v.value(i);
    if (kind == "clear" || kind == "from" || (kind == "odd" && x != 1) ||
        (kind == "nan" && std::isnan(x)) || (kind == "subnormal" && std::fabs(x) < least))
      v.set_bits(i, 0);
    else if (kind == "inf" && std::isinf(x))
      v.set_value(i, std::copysign(most, x));
  }
}

te_fl_status read_wrong(const Mutation& m, const te_fl_context& ctx, MutableCall& call,
                        const RunOp& run) {
  const te_fl_arg_desc& arg = call.argument(m.argument);
  const Tensors tensors = call.tensors(arg);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (m.kind == "scale") {
      const te_fl_tensor& t = *tensors[i];
      if (t.quant == nullptr) continue;
      const char* const name = View(t).has_data() ? "scale_inv" : "columnwise_scale_inv";
      View scales = part_of(t, name);
      if (!scales.has_data() && t.quant->scaling == TE_FL_SCALING_TENSOR)
        scales = part_of(t, "scale_inv");
      if (!scales.has_data()) continue;
      auto* quant = static_cast<te_fl_quant*>(call.memory(sizeof(te_fl_quant)));
      *quant = *t.quant;
      const size_t bytes =
          static_cast<size_t>(scales.elements()) * (scales.dtype() == TE_FL_F32 ? 4 : 1);
      void* const own = call.memory(bytes);
      View mine(own, scales.dtype(), scales.dtype() == TE_FL_F32 ? 32 : 8, scales.elements());
      for (int64_t n = 0; n < scales.elements(); ++n) mine.set_bits(n, scales.bits(n));
      mine.set_value(0, 1);
      (View(t).has_data() || quant->columnwise_scale_inv == nullptr ? quant->scale_inv
                                                                    : quant->columnwise_scale_inv) =
          own;
      call.replace(arg, i, t).quant = quant;
    } else if (arg.role == TE_FL_IN) {
      te_fl_tensor& own = copied(call, arg, i, *tensors[i]);
      View view = elements_of(own);
      if (own.quant != nullptr && !View(own).has_data()) continue;  // codes of one copy only
      spoil_input(view, m.kind, m.number);
    } else {
      spoil_input(View(*tensors[i]), m.kind, m.number);
    }
  }
  return run(ctx, call.args());
}

double towards_zero(int dtype, double x) {
  if (!std::isfinite(x) || x == 0) return x;
  if (dtype == TE_FL_BF16)
    return static_cast<double>(
        std::bit_cast<float>(std::bit_cast<uint32_t>(static_cast<float>(x)) & 0xffff0000u));
  int exponent;
  std::frexp(x, &exponent);
  const double step = std::ldexp(1.0, std::max(exponent, -13) - 11);
  return std::trunc(x / step) * step;
}

// Runs the op with an F32 result of its own and rounds that towards zero.
te_fl_status truncate(const te_fl_context& ctx, MutableCall& call, const te_fl_arg_desc& arg,
                      const RunOp& run) {
  const Tensors tensors = call.tensors(arg);
  Tensors own;
  for (size_t i = 0; i < tensors.size(); ++i) {
    te_fl_tensor wide = *tensors[i];
    if (wide.quant != nullptr || wide.dl.dtype.bits != 16) return run(ctx, call.args());
    wide.dl.dtype = {TE_FL_CODE_FLOAT, 32, 1};
    wide.dl.strides = nullptr, wide.dl.byte_offset = 0;
    wide.dl.data = call.memory(static_cast<size_t>(backend::numel(wide)) * 4);
    View to(wide);
    for (int64_t n = 0; n < to.elements(); ++n) to.set_value(n, View(*tensors[i]).value(n));
    own.push_back(&call.replace(arg, i, wide));
  }
  const te_fl_status status = run(ctx, call.args());
  for (size_t i = 0; status == TE_FL_OK && i < tensors.size(); ++i) {
    View from(*own[i]), to(*tensors[i]);
    for (int64_t n = 0; n < to.elements(); ++n)
      to.set_value(n, towards_zero(to.dtype(), from.value(n)));
  }
  return status;
}

void spoil_output(View v, const std::vector<uint64_t>& old, const std::string& kind,
                  double number) {
  const auto from = static_cast<int64_t>(number);
  const int64_t n = v.elements();
  const auto restore = [&](int64_t begin) {
    for (int64_t i = begin; i < n; ++i) v.set_bits(i, old[static_cast<size_t>(i)]);
  };
  if (kind == "none") return restore(0);
  if (kind == "last") return restore(n - 1);
  if (kind == "from") return restore(from);
  if (kind == "rows") return restore(from * v.columns());
  const double most =
      v.is_float() ? static_cast<double>(reference::largest_finite_of(v.dtype())) : 0;
  for (int64_t i = kind == "nan" || kind == "step" ? from : 0; i < n; ++i) {
    const double x = v.value(i);
    if (kind == "nan" && std::isnan(x))
      v.set_bits(i, 0);
    else if (kind == "inf" && std::isinf(x))
      v.set_value(i, std::copysign(most, x));
    else if (kind == "step" && std::isfinite(x) && x != most)
      v.set_bits(i, v.bits(i) ^ 1);
    else if (kind == "off" && std::isfinite(x))
      v.set_value(i, x * (1 + number));
    else if (kind == "old") {
      View before = v;
      const uint64_t now = v.bits(i);
      before.set_bits(i, old[static_cast<size_t>(i)]);
      const double was = before.value(i);
      v.set_bits(i, now);
      if (!std::isfinite(was)) v.set_bits(i, old[static_cast<size_t>(i)]);
    }
  }
}

te_fl_status write_wrong(const Mutation& m, const te_fl_context& ctx, MutableCall& call,
                         const RunOp& run) {
  const te_fl_arg_desc& arg = call.argument(m.argument);
  if (m.kind == "truncate") return truncate(ctx, call, arg, run);
  std::vector<View> views;
  std::vector<std::vector<uint64_t>> old;
  for (const te_fl_tensor* t : call.tensors(arg)) {
    views.push_back(elements_of(*t));
    old.push_back(views.back().has_data() ? views.back().all_bits() : std::vector<uint64_t>());
  }
  const te_fl_status status = run(ctx, call.args());
  for (size_t i = 0; status == TE_FL_OK && i < views.size(); ++i)
    if (views[i].has_data() && views[i].elements() > 0)
      spoil_output(views[i], old[i], m.kind, m.number);
  return status;
}

te_fl_status part_wrong(const Mutation& m, const te_fl_context& ctx, MutableCall& call,
                        const RunOp& run) {
  std::vector<View> views;
  std::vector<std::vector<uint64_t>> old;
  for (const te_fl_tensor* t : call.tensors(call.argument(m.argument))) {
    views.push_back(part_of(*t, m.kind));
    old.push_back(views.back().has_data() ? views.back().all_bits() : std::vector<uint64_t>());
  }
  const te_fl_status status = run(ctx, call.args());
  for (size_t i = 0; status == TE_FL_OK && i < views.size(); ++i)
    if (views[i].has_data() && views[i].elements() > 0) spoil_output(views[i], old[i], m.word, 0);
  return status;
}

// Runs the op once more with the arguments of `other`, whose scales `change` may change, and gives
// the codes that `choose` selects by row from that run to the outputs.
template <class Change, class Choose>
te_fl_status exchange_codes(const te_fl_context& ctx, MutableCall& call, MutableCall& other,
                            const te_fl_arg_desc& arg, const RunOp& run, const Change& change,
                            const Choose& choose) {
  const Tensors tensors = call.tensors(arg);
  Tensors own;
  for (size_t i = 0; i < tensors.size(); ++i) {
    te_fl_tensor mine = *tensors[i];
    if (mine.quant == nullptr || mine.quant->scaling != TE_FL_SCALING_TENSOR)
      return run(ctx, call.args());
    auto* quant = static_cast<te_fl_quant*>(other.memory(sizeof(te_fl_quant)));
    *quant = *mine.quant;
    const size_t bytes = bytes_of(mine.dl, backend::numel(mine));
    if (mine.dl.data != nullptr) mine.dl.data = other.memory(bytes);
    mine.dl.strides = nullptr, mine.dl.byte_offset = 0;
    if (quant->columnwise_data != nullptr) quant->columnwise_data = other.memory(bytes);
    const auto single = [&](auto*& pointer) {
      if (pointer == nullptr) return;
      auto* const copy = static_cast<float*>(other.memory(sizeof(float)));
      *copy = *static_cast<const float*>(pointer);
      pointer = copy;
    };
    single(quant->scale), single(quant->amax);
    auto* inverse = static_cast<float*>(quant->scale_inv);
    single(inverse);
    quant->scale_inv = inverse;
    if (quant->columnwise_scale_inv != nullptr) quant->columnwise_scale_inv = inverse;
    change(*quant);
    te_fl_tensor& kept = other.replace(arg, i, mine);
    kept.quant = quant;
    own.push_back(&kept);
  }
  te_fl_status status = run(ctx, other.args());
  if (status == TE_FL_OK) status = run(ctx, call.args());
  for (size_t i = 0; status == TE_FL_OK && i < tensors.size(); ++i)
    for (const bool columnwise : {false, true}) {
      const View from = columnwise ? part_of(*own[i], "columnwise_data") : View(*own[i]);
      View to = columnwise ? part_of(*tensors[i], "columnwise_data") : View(*tensors[i]);
      const backend::Matrix matrix = backend::as_matrix(*tensors[i]);
      for (int64_t n = 0; to.has_data() && n < to.elements(); ++n)
        if (choose(columnwise ? n % matrix.rows : n / std::max<int64_t>(matrix.cols, 1)))
          to.set_bits(n, from.bits(n));
    }
  return status;
}

te_fl_status codes_wrong(const Mutation& m, const te_fl_context& ctx, MutableCall& call,
                         const RunOp& run) {
  const te_fl_arg_desc& arg = call.argument(m.argument);
  MutableCall other = call;
  if (m.verb == "ties") {
    const te_fl_arg_desc& input = call.argument(m.kind);
    const Tensors inputs = other.tensors(input);
    for (size_t i = 0; i < inputs.size(); ++i) {
      View v(copied(other, input, i, *inputs[i]));
      for (int64_t n = 0; n < v.elements(); ++n)
        if (const double x = v.value(n); std::isfinite(x) && x != 0) v.set_bits(n, v.bits(n) + 1);
    }
    return exchange_codes(
        ctx, call, other, arg, run, [](te_fl_quant&) {}, [](int64_t) { return true; });
  }
  for (const te_fl_tensor* t : call.tensors(arg))
    if (t->quant == nullptr || (t->quant->flags & TE_FL_QUANT_COMPUTE_SCALE) != 0)
      return run(ctx, call.args());
  const bool all = m.verb == "scale";
  return exchange_codes(
      ctx, call, other, arg, run,
      [&](te_fl_quant& q) {
        *q.scale = all ? std::nextafter(*q.scale, std::numeric_limits<float>::max()) : 1;
      },
      [&](int64_t row) { return all || static_cast<double>(row) >= m.number; });
}

te_fl_status rng_wrong(const Mutation& m, const te_fl_context& ctx, MutableCall& call,
                       const RunOp& run) {
  te_fl_context own = ctx;
  te_fl_rng rng = *ctx.rng;
  if (m.argument == "offset") rng.offset = 0;
  if (m.argument == "seed_address") rng.seed_address = nullptr;
  if (m.argument == "offset_address") rng.offset_address = nullptr;
  uint64_t low = 0;
  if (m.argument == "high") {
    low = (rng.seed_address != nullptr ? *rng.seed_address : rng.seed) & 0xffffffffu;
    rng.seed_address = &low;
  }
  own.rng = &rng;
  return run(own, call.args());
}

}  // namespace

te_fl_status run_wrong(const Mutation& m, const te_fl_context& ctx, MutableCall& call,
                       const RunOp& run) {
  if (m.verb == "rng") return rng_wrong(m, ctx, call, run);
  if (m.verb == "read") return read_wrong(m, ctx, call, run);
  if (m.verb == "write") return write_wrong(m, ctx, call, run);
  if (m.verb == "part") return part_wrong(m, ctx, call, run);
  if (m.verb == "scale" || m.verb == "unscaled" || m.verb == "ties")
    return codes_wrong(m, ctx, call, run);
  const te_fl_arg_desc& arg = call.argument(m.argument);
  const double number = is_tensor(arg) ? 0 : call.number(arg);
  if (m.verb == "ignore") call.neutralise(arg);
  if (m.verb == "set") call.set_number(arg, m.number);
  if (m.verb == "floor") call.set_number(arg, std::max(number, m.number));
  if (m.verb == "cap") call.set_number(arg, std::min(number, m.number));
  if (m.verb == "float") call.set_number(arg, static_cast<double>(static_cast<float>(number)));
  return run(ctx, call.args());
}

te_fl_status run_both(const Mutation& m, const te_fl_context& ctx, MutableCall& call,
                      const RunOp& run, bool& changed) {
  std::vector<View> parts;
  for (const te_fl_arg_desc* arg : call.outputs()) {
    for (const te_fl_tensor* t : call.tensors(*arg)) {
      parts.emplace_back(*t);
      for (const char* name : {"columnwise_data", "scale_inv", "columnwise_scale_inv", "amax",
                               "columnwise_amax", "scale"})
        parts.push_back(part_of(*t, name));
    }
  }
  std::erase_if(parts, [](const View& v) { return !v.has_data(); });
  const auto contents = [&] {
    std::vector<std::vector<uint64_t>> all;
    for (const View& v : parts) all.push_back(v.all_bits());
    return all;
  };
  const auto restore = [&](const std::vector<std::vector<uint64_t>>& all) {
    for (size_t p = 0; p < parts.size(); ++p)
      for (int64_t i = 0; i < parts[p].elements(); ++i)
        parts[p].set_bits(i, all[p][static_cast<size_t>(i)]);
  };
  const auto before = contents();
  if (const te_fl_status status = run(ctx, call.args()); status != TE_FL_OK) return status;
  const auto right = contents();
  restore(before);
  const te_fl_status status = run_wrong(m, ctx, call, run);
  changed = status == TE_FL_OK && contents() != right;
  return status;
}

}  // namespace te_fl::mutants
