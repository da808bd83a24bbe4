// The layernorm and rmsnorm ops.
#include "te_fl/ops/norm.h"

#include "families.hpp"
#include "overlap.hpp"
#include "store.hpp"

namespace te_fl::opencl {
namespace {

enum : uint32_t {
  kZeroCentered = 1,
  kHasBeta = 2,
  kHasResidual = 4,
  kHasAdd = 8
};  // same values as in norm.cl

struct Forward {
  const te_fl_tensor *x, *residual, *sum, *gamma, *beta, *z, *mu, *rsigma;
  float epsilon;
  int32_t zero_centered_gamma;
};
Forward make_forward(const te_fl_layernorm_fwd_args& a) {
  return {a.x, a.residual, a.sum,    a.gamma,   a.beta,
          a.z, a.mu,       a.rsigma, a.epsilon, a.zero_centered_gamma};
}
Forward make_forward(const te_fl_rmsnorm_fwd_args& a) {
  return {a.x, a.residual, a.sum,    a.gamma,   nullptr,
          a.z, nullptr,    a.rsigma, a.epsilon, a.zero_centered_gamma};
}

template <class Args>
void forward(const DeviceCall& call, const Args& args) {
  const Forward f = make_forward(args);
  const Output out(*f.z, call.context.workspace);
  const backend::Matrix m = backend::as_matrix(*f.x);
  const uint32_t flags = (f.zero_centered_gamma != 0 ? kZeroCentered : 0u) |
                         (f.beta != nullptr ? kHasBeta : 0u) |
                         (f.sum != nullptr ? kHasResidual : 0u);
  const std::string options =
      "-DFORWARD " + define("GROUP", kGroup) + define("CENTERED", f.mu != nullptr) +
      define("TX", f.x) + define("TG", f.gamma) + define("TB", f.beta) + define("TR", f.residual) +
      define("TS", f.sum) + define("TZ", out.type());
  Launch(call.device, call.stream(), "norm", options, "norm_forward")
      .data(f.x)
      .data(f.residual)
      .data(f.sum)
      .data(f.gamma)
      .data(f.beta)
      .memory(out.data())
      .data(f.mu)
      .data(f.rsigma)
      .value(m.cols)
      .value(f.epsilon)
      .value(flags)
      .groups(m.rows, kGroup);
  out.write_codes(call);
}

template <class Args>
Refusal refuse_forward(const Device& device, const Args& args) {
  const Forward f = make_forward(args);
  if (!all_dense(f.x, f.residual, f.sum, f.gamma, f.beta) || !all_dense(f.mu, f.rsigma)) {
    return kNotContiguous;
  }
  if (backend::as_matrix(*f.x).cols == 0) return "normalises rows of one element or more";
  if (overlaps_askew(*f.z, f.x) || overlaps(*f.z, f.gamma) || overlaps(*f.z, f.residual)) {
    return kOverlaps;
  }
  if (f.sum != nullptr && (overlaps_askew(*f.sum, f.x) || overlaps_askew(*f.sum, f.residual))) {
    return kOverlaps;
  }
  return refuse_output(device, *f.z);
}

template <class Args>
size_t forward_workspace(const Args& args) {
  return output_workspace(*args.z);
}

struct Backward {
  const te_fl_tensor *dz, *x, *add, *mu, *rsigma, *gamma, *dx, *dgamma, *dbeta;
  int32_t zero_centered_gamma;
};
Backward make_backward(const te_fl_layernorm_bwd_args& a) {
  return {a.dz,    a.x,  a.add,    a.mu,    a.rsigma,
          a.gamma, a.dx, a.dgamma, a.dbeta, a.zero_centered_gamma};
}
Backward make_backward(const te_fl_rmsnorm_bwd_args& a) {
  return {a.dz,    a.x,  nullptr,  nullptr, a.rsigma,
          a.gamma, a.dx, a.dgamma, nullptr, a.zero_centered_gamma};
}
Backward make_backward(const te_fl_rmsnorm_bwd_add_args& a) {
  return {a.dz,    a.x,  a.add,    nullptr, a.rsigma,
          a.gamma, a.dx, a.dgamma, nullptr, a.zero_centered_gamma};
}

template <class Args>
void backward(const DeviceCall& call, const Args& args) {
  const Backward b = make_backward(args);
  const backend::Matrix m = backend::as_matrix(*b.x);
  const uint32_t flags = (b.zero_centered_gamma != 0 ? kZeroCentered : 0u) |
                         (b.dbeta != nullptr ? kHasBeta : 0u) | (b.add != nullptr ? kHasAdd : 0u);
  const std::string options = define("GROUP", kGroup) + define("CENTERED", b.mu != nullptr) +
                              define("TX", b.x) + define("TG", b.gamma) + define("TB", b.dgamma) +
                              define("TBETA", b.dbeta) + define("TR", b.add) + define("TS", b.dz) +
                              define("TZ", b.dx);
  Launch(call.device, call.stream(), "norm", options, "norm_weight_gradients")
      .data(b.dz)
      .data(b.x)
      .data(b.mu)
      .data(b.rsigma)
      .data(b.dgamma)
      .data(b.dbeta)
      .value(m.rows)
      .value(m.cols)
      .value(flags)
      .items(m.cols);
  Launch(call.device, call.stream(), "norm", options, "norm_backward")
      .data(b.dz)
      .data(b.x)
      .data(b.add)
      .data(b.mu)
      .data(b.rsigma)
      .data(b.gamma)
      .data(b.dx)
      .value(m.cols)
      .value(flags)
      .groups(m.rows, kGroup);
}

template <class Args>
Refusal refuse_backward(const Args& args) {
  const Backward b = make_backward(args);
  if (!all_dense(b.dz, b.x, b.add, b.mu, b.rsigma, b.gamma, b.dx, b.dgamma, b.dbeta)) {
    return kNotContiguous;
  }
  const bool askew = overlaps_askew(*b.dx, b.dz) || overlaps_askew(*b.dx, b.x) ||
                     overlaps_askew(*b.dx, b.add) || overlaps(*b.dx, b.gamma);
  return askew ? kOverlaps : nullptr;
}

template <class Args>
void append_forward(Ops& ops, const char* name) {
  ops.push_back(
      descriptor<Args, forward<Args>, refuse_forward<Args>, forward_workspace<Args>>(name));
  ops.back().later_args = "residual sum";
}
template <class Args>
void append_backward(Ops& ops, const char* name) {
  ops.push_back(descriptor<Args, backward<Args>, refuse_backward<Args>>(name));
}

}  // namespace

void append_norm(Ops& ops) {
  append_forward<te_fl_layernorm_fwd_args>(ops, "layernorm_fwd");
  append_forward<te_fl_rmsnorm_fwd_args>(ops, "rmsnorm_fwd");
  append_backward<te_fl_layernorm_bwd_args>(ops, "layernorm_bwd");
  ops.back().later_args = "add";
  append_backward<te_fl_rmsnorm_bwd_args>(ops, "rmsnorm_bwd");
  append_backward<te_fl_rmsnorm_bwd_add_args>(ops, "rmsnorm_bwd_add");
}

}  // namespace te_fl::opencl
