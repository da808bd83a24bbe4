// Optimizers over lists of tensors. The elements of all tensors are divided among the threads as if
// they were one array. Norms are computed from one partial sum per block of fixed size, so they do
// not depend on the number of threads.
#include "te_fl/ops/optimizer.h"

#include <cmath>
#include <string>
#include <vector>

#include "convert.hpp"
#include "families.hpp"
#include "quant_store.hpp"
#include "tensor_list.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimizer.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "simd-inl.hpp"

#ifndef TE_FL_CPU_OPTIMIZER_FACTORS_
#define TE_FL_CPU_OPTIMIZER_FACTORS_
namespace te_fl::cpu {

struct AdamFactors {
  float beta1, rest1, beta2, rest2;  // the decays beta1 and beta2, and 1 - decay of each
  float inverse_correction1, inverse_correction2;
  float lr, epsilon;
  float l2_decay, decoupled_decay;  // at least one of them is 0
};

struct SgdFactors {
  float scale, lr, momentum, undamped;
  float decay_before, decay_after;  // weight decay before or after momentum; at least one is 0
  bool first_run, nesterov;
};

}  // namespace te_fl::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace te_fl::cpu::HWY_NAMESPACE {

struct AdamKernel {
  explicit AdamKernel(const AdamFactors& f)
      : beta1(SetF(f.beta1)),
        rest1(SetF(f.rest1)),
        beta2(SetF(f.beta2)),
        rest2(SetF(f.rest2)),
        correct1(SetF(f.inverse_correction1)),
        correct2(SetF(f.inverse_correction2)),
        lr(SetF(f.lr)),
        epsilon(SetF(f.epsilon)),
        l2(SetF(f.l2_decay)),
        decoupled(SetF(f.decoupled_decay)),
        has_l2(f.l2_decay != 0) {}

  HWY_INLINE void Update(VF g, VF& m, VF& v, VF& p) const {
    if (has_l2) g = hn::MulAdd(l2, p, g);
    m = hn::MulAdd(beta1, m, hn::Mul(rest1, g));
    v = hn::MulAdd(beta2, v, hn::Mul(hn::Mul(rest2, g), g));
    const VF root = hn::Add(hn::Sqrt(hn::Mul(v, correct2)), epsilon);
    const VF update = hn::MulAdd(decoupled, p, hn::Div(hn::Mul(m, correct1), root));
    p = hn::NegMulAdd(lr, update, p);
  }

  VF beta1, rest1, beta2, rest2, correct1, correct2, lr, epsilon, l2, decoupled;
  bool has_l2;
};

void AdamUpdate(const AdamFactors& factors, const float* HWY_RESTRICT g, float* HWY_RESTRICT m,
                float* HWY_RESTRICT v, float* HWY_RESTRICT p, int64_t n) {
  const AdamKernel kernel(factors);
  const auto lanes = static_cast<int64_t>(NumLanes());
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    VF mv = LoadF32(m + i), vv = LoadF32(v + i), pv = LoadF32(p + i);
    kernel.Update(LoadF32(g + i), mv, vv, pv);
    StoreF32(mv, m + i);
    StoreF32(vv, v + i);
    StoreF32(pv, p + i);
  }
  if (i == n) return;
  const auto rest = static_cast<size_t>(n - i);
  VF mv = LoadPart(m + i, rest), vv = LoadPart(v + i, rest), pv = LoadPart(p + i, rest);
  kernel.Update(LoadPart(g + i, rest), mv, vv, pv);
  StorePart(mv, m + i, rest);
  StorePart(vv, v + i, rest);
  StorePart(pv, p + i, rest);
}

struct SgdKernel {
  explicit SgdKernel(const SgdFactors& f)
      : scale(SetF(f.scale)),
        lr(SetF(f.lr)),
        momentum(SetF(f.momentum)),
        undamped(SetF(f.undamped)),
        before(SetF(f.decay_before)),
        after(SetF(f.decay_after)),
        keeps_momentum(f.momentum != 0),
        first_run(f.first_run),
        nesterov(f.nesterov) {}

  HWY_INLINE void Update(VF g, VF& m, VF& p) const {
    g = hn::MulAdd(before, p, hn::Mul(g, scale));
    if (keeps_momentum) {
      m = first_run ? g : hn::MulAdd(momentum, m, hn::Mul(undamped, g));
      g = nesterov ? hn::MulAdd(momentum, m, g) : m;
    }
    g = hn::MulAdd(after, p, g);
    p = hn::NegMulAdd(lr, g, p);
  }

  VF scale, lr, momentum, undamped, before, after;
  bool keeps_momentum, first_run, nesterov;
};

// Updates n parameters p with gradients g. `m` (the momentum buffer) may be NULL if there is no
// momentum.
void SgdUpdate(const SgdFactors& factors, const float* HWY_RESTRICT g, float* HWY_RESTRICT m,
               float* HWY_RESTRICT p, int64_t n) {
  const SgdKernel kernel(factors);
  const auto lanes = static_cast<int64_t>(NumLanes());
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    VF mv = kernel.keeps_momentum ? LoadF32(m + i) : SetF(0.0f), pv = LoadF32(p + i);
    kernel.Update(LoadF32(g + i), mv, pv);
    if (kernel.keeps_momentum) StoreF32(mv, m + i);
    StoreF32(pv, p + i);
  }
  if (i == n) return;
  const auto rest = static_cast<size_t>(n - i);
  VF mv = kernel.keeps_momentum ? LoadPart(m + i, rest) : SetF(0.0f), pv = LoadPart(p + i, rest);
  kernel.Update(LoadPart(g + i, rest), mv, pv);
  if (kernel.keeps_momentum) StorePart(mv, m + i, rest);
  StorePart(pv, p + i, rest);
}

// out = x * scale, rounded to Out. Returns true if all x and all rounded results are finite.
template <class In, class Out>
bool ScaleAs(const void* raw, float factor, int64_t n, void* raw_out) {
  const In* x = static_cast<const In*>(raw);
  Out* out = static_cast<Out*>(raw_out);
  const VF scale = SetF(factor);
  const auto lanes = static_cast<int64_t>(NumLanes());
  // x * 0 is 0 for finite x and NaN otherwise, and the sum keeps a NaN.
  VF spoiled = SetF(0.0f);
  const auto watch = [&](VF v) HWY_ATTR { spoiled = hn::MulAdd(v, SetF(0.0f), spoiled); };
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const VF v = LoadF32(x + i);
    watch(v);
    StoreF32(hn::Mul(v, scale), out + i);
    watch(LoadF32(out + i));
  }
  if (i < n) {
    const auto rest = static_cast<size_t>(n - i);
    const VF v = LoadPart(x + i, rest);
    watch(v);
    StorePart(hn::Mul(v, scale), out + i, rest);
    watch(LoadPart(out + i, rest));
  }
  return hn::AllTrue(DF(), hn::Eq(spoiled, SetF(0.0f)));
}

template <class In>
bool ScaleTo(int out_dtype, const void* x, float scale, int64_t n, void* out) {
  switch (out_dtype) {
    case TE_FL_F32:
      return ScaleAs<In, float>(x, scale, n, out);
    case TE_FL_F16:
      return ScaleAs<In, numeric::half>(x, scale, n, out);
    default:
      return ScaleAs<In, numeric::bfloat16>(x, scale, n, out);
  }
}

bool ScaleAndCheck(int in_dtype, int out_dtype, const void* x, float scale, int64_t n, void* out) {
  switch (in_dtype) {
    case TE_FL_F32:
      return ScaleTo<float>(out_dtype, x, scale, n, out);
    case TE_FL_F16:
      return ScaleTo<numeric::half>(out_dtype, x, scale, n, out);
    default:
      return ScaleTo<numeric::bfloat16>(out_dtype, x, scale, n, out);
  }
}

// The sum of squares in double, because squares of large FP32 values overflow FP32.
template <class T>
double SumSquares(const void* raw, int64_t n) {
  const T* x = static_cast<const T*>(raw);
  const auto lanes = static_cast<int64_t>(NumLanes());
  HWY_ALIGN float buffer[16];
#if HWY_HAVE_FLOAT64 && HWY_TARGET != HWY_SCALAR
  const hn::Repartition<double, DF> dd;
  auto low = hn::Zero(dd), high = low;
  const auto add = [&](VF v) HWY_ATTR {
    const hn::Half<DF> half;
    const auto a = hn::PromoteTo(dd, hn::LowerHalf(half, v));
    const auto b = hn::PromoteTo(dd, hn::UpperHalf(half, v));
    low = hn::MulAdd(a, a, low);
    high = hn::MulAdd(b, b, high);
  };
#else
  double sum = 0;
  const auto add = [&](VF v) HWY_ATTR {
    StoreF32(v, buffer);
    for (int64_t l = 0; l < lanes; ++l) sum += double{buffer[l]} * buffer[l];
  };
#endif
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) add(LoadF32(x + i));
  if (i < n) add(LoadPart(x + i, static_cast<size_t>(n - i)));
#if HWY_HAVE_FLOAT64 && HWY_TARGET != HWY_SCALAR
  (void)buffer;
  return hn::GetLane(hn::SumOfLanes(dd, hn::Add(low, high)));
#else
  return sum;
#endif
}

double SumSquaresByDtype(int dtype, const void* x, int64_t n) {
  switch (dtype) {
    case TE_FL_F32:
      return SumSquares<float>(x, n);
    case TE_FL_F16:
      return SumSquares<numeric::half>(x, n);
    default:
      return SumSquares<numeric::bfloat16>(x, n);
  }
}

}  // namespace te_fl::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace te_fl::cpu {
namespace {

HWY_EXPORT(AdamUpdate);
HWY_EXPORT(SgdUpdate);
HWY_EXPORT(ScaleAndCheck);
HWY_EXPORT(SumSquaresByDtype);

bool is_noop(const te_fl_tensor* flag) {
  return flag != nullptr && *backend::data<const int32_t>(*flag) != 0;
}

// The learning rate: lr_tensor's value if there is one, else lr.
template <class Args>
float lr_of(const Args& a) {
  return a.lr_tensor != nullptr ? *backend::data<const float>(*a.lr_tensor) : a.lr;
}

// Accesses elements [first, first + n) of a tensor as FP32. FP32 tensors are accessed in place;
// other dtypes are converted into a buffer, which store() writes back.
class FloatRun {
 public:
  FloatRun(const te_fl_tensor& t, int64_t first, int64_t n, bool read = true)
      : dtype_(dtype_of(t)), n_(n), at_(element(t, first)) {
    if (dtype_ != TE_FL_F32 && read) load_f32(dtype_, at_, n, chunk_.data);
  }
  float* data() { return dtype_ == TE_FL_F32 ? static_cast<float*>(at_) : chunk_.data; }
  void store() {
    if (dtype_ != TE_FL_F32) store_f32(dtype_, chunk_.data, n_, at_);
  }
  static void* element(const te_fl_tensor& t, int64_t first) {
    return backend::data<char>(t) + first * element_bytes(t);
  }

 private:
  int dtype_;
  int64_t n_;
  void* at_;
  Chunk chunk_;
};

float* floats(const te_fl_tensor& t, int64_t first) { return backend::data<float>(t) + first; }

// Calls f(tensor, first, n) on the pool, for pieces of at most a chunk that cover all elements.
template <class F>
void for_each_chunk(TensorList list, int64_t count, F&& f) {
  const JointArray joint(list, count);
  Parts(joint.size(), kGrain).run([&](int64_t, int64_t begin, int64_t end) {
    joint.runs(begin, end, [&](int64_t t, int64_t first, int64_t n) {
      for (int64_t done = 0; done < n; done += kChunk) {
        f(t, first + done, std::min(kChunk, n - done));
      }
    });
  });
}

// ---- Adam

Refusal adam_refusal(const te_fl_multi_tensor_adam_args& a) {
  const bool served = list_dense(a.grads, a.grads_count) && list_dense(a.params, a.params_count) &&
                      list_dense(a.exp_avgs, a.exp_avgs_count) &&
                      list_dense(a.exp_avg_sqs, a.exp_avg_sqs_count) &&
                      list_dense(a.master_params, a.master_params_count);
  if (!served) return kNotContiguous;
  for (int64_t t = 0; t < std::min(a.fp8_params_count, a.params_count); ++t) {
    if (const Refusal refusal = refuse_output(*a.fp8_params[t])) return refusal;
    if (overlaps(*a.fp8_params[t], *a.params[t])) return "fp8_params share memory with params";
  }
  return nullptr;
}

AdamFactors adam_factors(const te_fl_multi_tensor_adam_args& a) {
  const int64_t step =
      a.step_tensor != nullptr ? *backend::data<const int64_t>(*a.step_tensor) : a.step;
  const auto inverse_correction = [&](double beta) {
    return a.bias_correction
               ? static_cast<float>(1.0 / (1.0 - std::pow(beta, static_cast<double>(step))))
               : 1.0f;
  };
  const bool l2 = a.mode == TE_FL_ADAM_MODE_L2;
  return {a.beta1,
          static_cast<float>(1.0 - double{a.beta1}),
          a.beta2,
          static_cast<float>(1.0 - double{a.beta2}),
          inverse_correction(a.beta1),
          inverse_correction(a.beta2),
          lr_of(a),
          a.epsilon,
          l2 ? a.weight_decay : 0.0f,
          l2 ? 0.0f : a.weight_decay};
}

void update_params(const te_fl_multi_tensor_adam_args& a) {
  const AdamFactors factors = adam_factors(a);
  const bool master = a.master_params_count != 0;
  const auto update = HWY_DYNAMIC_DISPATCH(AdamUpdate);
  for_each_chunk(a.grads, a.grads_count, [&](int64_t t, int64_t first, int64_t n) {
    FloatRun g(*a.grads[t], first, n);
    FloatRun p(master ? *a.master_params[t] : *a.params[t], first, n);
    update(factors, g.data(), floats(*a.exp_avgs[t], first), floats(*a.exp_avg_sqs[t], first),
           p.data(), n);
    p.store();
    if (master) {
      const te_fl_tensor& copy = *a.params[t];
      store_f32(dtype_of(copy), p.data(), n, FloatRun::element(copy, first));
    }
  });
}

void adam(const te_fl_context&, const te_fl_multi_tensor_adam_args& a) {
  if (!is_noop(a.noop_flag)) update_params(a);
  for (int64_t t = 0; t < a.fp8_params_count; ++t) {
    const Loader values(*a.params[t]);
    const auto produce = [&](const Piece& piece, float* out) { values(piece.col, piece.n, out); };
    store_output(*a.fp8_params[t], produce, {.flat = true});
  }
}

// ---- SGD

Refusal sgd_refusal(const te_fl_multi_tensor_sgd_args& a) {
  const bool served = list_dense(a.grads, a.grads_count) && list_dense(a.params, a.params_count) &&
                      list_dense(a.momentums, a.momentums_count) &&
                      list_dense(a.param_copies, a.param_copies_count);
  return served ? nullptr : kNotContiguous;
}

void sgd(const te_fl_context&, const te_fl_multi_tensor_sgd_args& a) {
  if (is_noop(a.noop_flag)) return;
  const bool after = a.wd_after_momentum != 0;
  const SgdFactors factors = {a.scale,
                              lr_of(a),
                              a.momentum,
                              static_cast<float>(1.0 - double{a.dampening}),
                              after ? 0.0f : a.weight_decay,
                              after ? a.weight_decay : 0.0f,
                              a.first_run != 0,
                              a.nesterov != 0};
  const auto update = HWY_DYNAMIC_DISPATCH(SgdUpdate);
  for_each_chunk(a.grads, a.grads_count, [&](int64_t t, int64_t first, int64_t n) {
    FloatRun g(*a.grads[t], first, n);
    FloatRun p(*a.params[t], first, n);
    update(factors, g.data(), a.momentum != 0 ? floats(*a.momentums[t], first) : nullptr, p.data(),
           n);
    p.store();
    if (a.param_copies_count != 0) {
      // Copies the rounded parameter, so that a copy of the same dtype has the same bits.
      FloatRun rounded(*a.params[t], first, n);
      const te_fl_tensor& copy = *a.param_copies[t];
      store_f32(dtype_of(copy), rounded.data(), n, FloatRun::element(copy, first));
    }
  });
}

// ---- scale

Refusal scale_refusal(const te_fl_multi_tensor_scale_args& a) {
  if (!list_dense(a.inputs, a.inputs_count) || !list_dense(a.outputs, a.outputs_count)) {
    return kNotContiguous;
  }
  for (int64_t t = 0; t < std::min(a.inputs_count, a.outputs_count); ++t) {
    if (overlaps_askew(*a.outputs[t], *a.inputs[t])) return kOverlaps;
  }
  return nullptr;
}

void scale(const te_fl_context&, const te_fl_multi_tensor_scale_args& a) {
  const auto kernel = HWY_DYNAMIC_DISPATCH(ScaleAndCheck);
  std::atomic<bool> finite{true};
  float factor = a.scale;
  if (a.norm != nullptr) {
    const float norm = *backend::data<const float>(*a.norm);
    finite = std::isfinite(norm);
    if (finite && norm > a.max_norm) factor = a.scale * (a.max_norm / norm);
  }
  const JointArray joint(a.inputs, a.inputs_count);
  const bool large = exceeds_cache(joint.size() * int64_t{sizeof(float)});
  Parts(joint.size(), kGrain).run([&](int64_t, int64_t begin, int64_t end) {
    joint.runs(begin, end, [&](int64_t t, int64_t first, int64_t n) {
      const te_fl_tensor &in = *a.inputs[t], &out = *a.outputs[t];
      bool good = true;
      if (large && dtype_of(out) == TE_FL_F32 &&
          backend::data<char>(in) != backend::data<char>(out)) {
        Chunk product;
        for (int64_t done = 0; done < n; done += kChunk) {
          const int64_t count = std::min(kChunk, n - done), at = first + done;
          good = kernel(dtype_of(in), TE_FL_F32, FloatRun::element(in, at), factor, count,
                        product.data) &&
                 good;
          store_f32(TE_FL_F32, product.data, count, floats(out, at), true);
        }
        store_fence();
      } else {
        good = kernel(dtype_of(in), dtype_of(out), FloatRun::element(in, first), factor, n,
                      FloatRun::element(out, first));
      }
      if (!good) finite.store(false, std::memory_order_relaxed);
    });
  });
  if (!finite) *backend::data<int32_t>(*a.noop_flag) = 1;
}

// ---- norms

constexpr int64_t kBlock = 1 << 16;  // number of elements per partial sum

// The sum of squares of each tensor.
std::vector<double> sums_of_squares(TensorList inputs, int64_t count) {
  std::vector<int64_t> first_block = {0};
  for (int64_t t = 0; t < count; ++t) {
    first_block.push_back(first_block.back() + (backend::numel(*inputs[t]) + kBlock - 1) / kBlock);
  }
  std::vector<double> partial(static_cast<size_t>(first_block.back()));
  const auto kernel = HWY_DYNAMIC_DISPATCH(SumSquaresByDtype);
  const JointArray joint(inputs, count);
  const auto block = [&](int64_t t, int64_t index) {
    const te_fl_tensor& x = *inputs[t];
    const int64_t begin = index * kBlock;
    partial[static_cast<size_t>(first_block[static_cast<size_t>(t)] + index)] = kernel(
        dtype_of(x), FloatRun::element(x, begin), std::min(kBlock, backend::numel(x) - begin));
  };
  // Each part of the joint array computes the blocks that start in it.
  Parts(joint.size(), kGrain).run([&](int64_t, int64_t begin, int64_t end) {
    joint.runs(begin, end, [&](int64_t t, int64_t first, int64_t n) {
      for (int64_t b = (first + kBlock - 1) / kBlock; b * kBlock < first + n; ++b) block(t, b);
    });
  });
  std::vector<double> sums(static_cast<size_t>(count), 0.0);
  for (size_t t = 0; t < sums.size(); ++t) {
    for (int64_t b = first_block[t]; b < first_block[t + 1]; ++b) {
      sums[t] += partial[static_cast<size_t>(b)];
    }
  }
  return sums;
}

// Writes sqrt(sum (factor x)^2) over all tensors, and per tensor if requested.
void norms(TensorList inputs, int64_t count, double factor, const te_fl_tensor& norm,
           const te_fl_tensor* per_tensor) {
  const std::vector<double> sums = sums_of_squares(inputs, count);
  double total = 0;
  for (double sum : sums) total += sum;
  const auto root = [&](double sum) {
    return static_cast<float>(std::abs(factor) * std::sqrt(sum));
  };
  *backend::data<float>(norm) = root(total);
  if (per_tensor == nullptr) return;
  for (int64_t t = 0; t < count; ++t) {
    backend::data<float>(*per_tensor)[t * backend::stride(*per_tensor, 0)] =
        root(sums[static_cast<size_t>(t)]);
  }
}

template <class Args>
Refusal norm_refusal(const Args& a) {
  return list_dense(a.inputs, a.inputs_count) ? nullptr : kNotContiguous;
}

void l2norm(const te_fl_context&, const te_fl_multi_tensor_l2norm_args& a) {
  norms(a.inputs, a.inputs_count, 1.0, *a.norm, a.per_tensor_norms);
}

void unscale_l2norm(const te_fl_context&, const te_fl_multi_tensor_unscale_l2norm_args& a) {
  norms(a.inputs, a.inputs_count, *backend::data<const float>(*a.inv_scale), *a.norm,
        a.per_tensor_norms);
}

}  // namespace

void append_optimizer(std::vector<te_fl_op_desc>& ops) {
  using L2norm = te_fl_multi_tensor_l2norm_args;
  using UnscaleL2norm = te_fl_multi_tensor_unscale_l2norm_args;
  ops.push_back(
      descriptor<te_fl_multi_tensor_scale_args, scale, scale_refusal>("multi_tensor_scale"));
  ops.back().later_args = "norm max_norm";
  ops.push_back(descriptor<L2norm, l2norm, norm_refusal<L2norm>>("multi_tensor_l2norm"));
  ops.push_back(descriptor<UnscaleL2norm, unscale_l2norm, norm_refusal<UnscaleL2norm>>(
      "multi_tensor_unscale_l2norm"));
  ops.push_back(descriptor<te_fl_multi_tensor_adam_args, adam, adam_refusal>("multi_tensor_adam"));
  ops.back().later_args = "lr_tensor step_tensor fp8_params";
  ops.push_back(descriptor<te_fl_multi_tensor_sgd_args, sgd, sgd_refusal>("multi_tensor_sgd"));
  ops.back().later_args = "lr_tensor";
}

}  // namespace te_fl::cpu
#endif
