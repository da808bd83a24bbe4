// Layer and RMS normalisation: the ops, and which kernels serve a call: the fused ones of norm.cuh
// if they can, else the general ones.
#include "te_fl/ops/norm.h"

#include "families.hpp"
#include "norm.cuh"
#include "norm_general.cuh"
#include "overlap.hpp"

namespace te_fl::cuda {

namespace {

unsigned row_blocks(int64_t rows) {
  return static_cast<unsigned>(std::max<int64_t>(1, std::min<int64_t>(rows, 132 * 32)));
}

// x + residual is in sum: what is left to do.
NormForward summed(NormForward f) {
  if (f.sum != nullptr) f.x = f.sum;
  f.residual = f.sum = nullptr;
  return f;
}

// One pass for plain outputs of any types; false if it does not serve the call.
bool forward_general_rows(const te_fl_context& ctx, const NormForward& f) {
  const backend::Matrix m = backend::as_matrix(*f.x);
  if (backend::scaling(*f.z) != TE_FL_SCALING_NONE || m.rows == 0 || m.rows > INT32_MAX ||
      m.cols == 0 || m.cols > kRegisterCols) {
    return false;
  }
  const auto kernel = m.cols <= kRegisterCols / 4   ? normalise_rows_kernel<1>
                      : m.cols <= kRegisterCols / 2 ? normalise_rows_kernel<2>
                                                    : normalise_rows_kernel<4>;
  kernel<<<static_cast<unsigned>(m.rows), kThreads, 0, stream_of(ctx)>>>(
      Source(*f.x), Source(*f.gamma), f.beta != nullptr ? Source(*f.beta) : Source(), Target(*f.z),
      m.cols, f.epsilon, f.zero_centered ? 1.0f : 0.0f,
      f.mu != nullptr ? backend::data<float>(*f.mu) : nullptr, backend::data<float>(*f.rsigma));
  check_launch("normalise_rows_kernel");
  return true;
}

float* rest_of(const te_fl_context& ctx) {
  return reinterpret_cast<float*>(static_cast<char*>(ctx.workspace) + kStoreWorkspace);
}

// Writes statistics, and sum if there is a residual.
void forward_statistics(const te_fl_context& ctx, NormForward f) {
  if (forward_rows(ctx, f, RowTask::kStatistics, rest_of(ctx), nullptr, nullptr)) return;
  const backend::Matrix m = backend::as_matrix(*f.x);
  if (f.sum != nullptr) {
    store_output(ctx, *f.sum, AddPair{Source(*f.x), Source(*f.residual), m.cols});
    f = summed(f);
  }
  if (m.rows == 0) return;
  statistics_kernel<<<row_blocks(m.rows), kThreads, 0, stream_of(ctx)>>>(
      Source(*f.x), m.rows, m.cols, f.epsilon,
      f.mu != nullptr ? backend::data<float>(*f.mu) : nullptr, rest_of(ctx),
      backend::data<float>(*f.rsigma));
  check_launch("statistics_kernel");
}

// Codes with a scale per tensor: x is read once if the scale is given, else twice. Not served:
// false, and `known` says whether statistics and sum are written.
bool forward_scaled(const te_fl_context& ctx, const NormForward& f, bool& known) {
  const backend::Matrix m = backend::as_matrix(*f.x);
  if (m.rows == 0 || m.cols == 0) return false;
  Quantised q = quantised(*f.z, nullptr, FLT_MAX);
  const auto store = [&](const NormForward& call) {
    return q.columns != nullptr ? forward_tiles(ctx, call, q)
                                : forward_rows(ctx, call, RowTask::kStore, nullptr, nullptr, &q);
  };
  if ((f.z->quant->flags & TE_FL_QUANT_COMPUTE_SCALE) == 0) return store(f);
  auto* found = static_cast<float*>(ctx.workspace);
  check(cudaMemsetAsync(found, 0, sizeof(float), stream_of(ctx)), "cudaMemsetAsync");
  q.found = found;
  if (q.columns != nullptr && slabs_serve(f, q) &&
      forward_lines(ctx, f, reinterpret_cast<float4*>(rest_of(ctx)), found)) {
    forward_slabs(ctx, f, q, rest_of(ctx));
    return true;
  }
  known = forward_rows(ctx, f, RowTask::kAmax, rest_of(ctx), found, nullptr);
  return known && store(summed(f));
}

void run_forward(const te_fl_context& ctx, const NormForward& f) {
  check_output(*f.z, "z");
  bool known = false;
  const uint32_t scaling = backend::scaling(*f.z);
  if (scaling == TE_FL_SCALING_TENSOR && forward_scaled(ctx, f, known)) return;
  if (scaling == TE_FL_SCALING_BLOCK_1X128 || scaling == TE_FL_SCALING_BLOCK_128X128) {
    const Quantised q = quantised(*f.z, nullptr, FLT_MAX);
    if (slabs_serve(f, q)) return forward_slabs(ctx, f, q, rest_of(ctx));
  }
  if (scaling == TE_FL_SCALING_NONE && dtype_of(*f.z) == dtype_of(*f.x) &&
      (forward_lines(ctx, f, nullptr, nullptr) ||
       forward_rows(ctx, f, RowTask::kStore, nullptr, nullptr, nullptr))) {
    return;
  }
  if (f.sum == nullptr && forward_general_rows(ctx, f)) return;
  if (!known) forward_statistics(ctx, f);
  const NormForward left = summed(f);
  store_output(ctx, *f.z,
               Normalise{Source(*left.x), Source(*left.gamma),
                         left.beta != nullptr ? Source(*left.beta) : Source(),
                         left.mu != nullptr ? backend::data<float>(*left.mu) : nullptr,
                         rest_of(ctx), backend::data<float>(*left.rsigma),
                         backend::as_matrix(*left.x).cols, left.zero_centered ? 1.0f : 0.0f});
}

template <class Args>
Refusal refuse_forward(const Args& a, bool dense_rest) {
  if (!dense_rest || !all_dense(a.x, a.residual, a.sum)) return kNotContiguous;
  if (const Refusal why = refuse_output(*a.z)) return why;
  const te_fl_tensor* const inputs[] = {a.x, a.residual};
  for (const te_fl_tensor* in : inputs) {
    if (in == nullptr) continue;
    if (overlaps_askew(*a.z, *in)) return kOverlaps;
    if (a.sum != nullptr && overlaps_askew(*a.sum, *in)) return kOverlaps;
  }
  return nullptr;
}

void layernorm_fwd(const te_fl_context& ctx, const te_fl_layernorm_fwd_args& a) {
  run_forward(ctx, {a.x, a.gamma, a.beta, a.z, a.mu, a.rsigma, a.residual, a.sum, a.epsilon,
                    a.zero_centered_gamma != 0});
}
Refusal refuse_layernorm_fwd(const te_fl_layernorm_fwd_args& a) {
  return refuse_forward(a, all_dense(a.gamma, a.beta, a.mu, a.rsigma));
}
void rmsnorm_fwd(const te_fl_context& ctx, const te_fl_rmsnorm_fwd_args& a) {
  run_forward(ctx, {a.x, a.gamma, nullptr, a.z, nullptr, a.rsigma, a.residual, a.sum, a.epsilon,
                    a.zero_centered_gamma != 0});
}
Refusal refuse_rmsnorm_fwd(const te_fl_rmsnorm_fwd_args& a) {
  return refuse_forward(a, all_dense(a.gamma, a.rsigma));
}
template <class Args>
size_t forward_workspace(const te_fl_context&, const Args& a) {
  const int64_t rows = backend::as_matrix(*a.x).rows;
  return kStoreWorkspace + (backend::scaling(*a.z) == TE_FL_SCALING_NONE
                                ? static_cast<size_t>(rows) * sizeof(float)
                                : slabs_bytes(rows));
}

// ---- backward

size_t means_bytes(int64_t rows) {
  return static_cast<size_t>(round_up(2 * rows * static_cast<int64_t>(sizeof(float)), 256));
}
template <class Args>
size_t backward_workspace(const te_fl_context&, const Args& a) {
  const backend::Matrix m = backend::as_matrix(*a.x);
  const size_t general = means_bytes(m.rows) + column_sums_bytes(m.rows, m.cols);
  return kStoreWorkspace + std::max(general, backward_bytes(m.rows, m.cols));
}

void run_backward(const te_fl_context& ctx, const NormBackward& b) {
  const backend::Matrix m = backend::as_matrix(*b.x);
  char* scratch = static_cast<char*>(ctx.workspace) + kStoreWorkspace;
  if (backward_rows(ctx, b, reinterpret_cast<float*>(scratch))) return;
  const Gradient args{Source(*b.dz),
                      Source(*b.x),
                      Source(*b.gamma),
                      b.add != nullptr ? Source(*b.add) : Source(),
                      b.mu != nullptr ? backend::data<const float>(*b.mu) : nullptr,
                      backend::data<const float>(*b.rsigma),
                      m.cols,
                      b.zero_centered ? 1.0f : 0.0f};
  auto* means = reinterpret_cast<float*>(scratch);
  auto* partials = reinterpret_cast<float*>(scratch + means_bytes(m.rows));
  // First what is summed, then dx, which may share the memory of dz.
  column_sums(ctx, m.rows, m.cols, partials, *b.dgamma, false, GradientOfGamma{args});
  if (b.dbeta != nullptr) {
    column_sums(ctx, m.rows, m.cols, partials, *b.dbeta, false, GradientOfBeta{args.dz, m.cols});
  }
  if (m.rows == 0 || m.cols == 0) return;
  row_means_kernel<<<row_blocks(m.rows), kThreads, 0, stream_of(ctx)>>>(args, m.rows, means);
  check_launch("row_means_kernel");
  store_output(ctx, *b.dx, GradientOfInput{args, means});
}

template <class Args>
Refusal refuse_backward(const Args& a, const te_fl_tensor* add, bool dense_rest) {
  if (!dense_rest || !all_dense(a.dz, a.x, a.rsigma, a.gamma, a.dx, a.dgamma, add)) {
    return kNotContiguous;
  }
  const te_fl_tensor* const inputs[] = {a.dz, a.x, add};
  for (const te_fl_tensor* in : inputs) {
    if (in != nullptr && overlaps_askew(*a.dx, *in)) return kOverlaps;
  }
  return nullptr;
}

void layernorm_bwd(const te_fl_context& ctx, const te_fl_layernorm_bwd_args& a) {
  run_backward(ctx, {a.dz, a.x, a.add, a.mu, a.rsigma, a.gamma, a.dx, a.dgamma, a.dbeta,
                     a.zero_centered_gamma != 0});
}
Refusal refuse_layernorm_bwd(const te_fl_layernorm_bwd_args& a) {
  return refuse_backward(a, a.add, all_dense(a.mu, a.dbeta));
}
void rmsnorm_bwd(const te_fl_context& ctx, const te_fl_rmsnorm_bwd_args& a) {
  run_backward(ctx, {a.dz, a.x, nullptr, nullptr, a.rsigma, a.gamma, a.dx, a.dgamma, nullptr,
                     a.zero_centered_gamma != 0});
}
Refusal refuse_rmsnorm_bwd(const te_fl_rmsnorm_bwd_args& a) {
  return refuse_backward(a, nullptr, true);
}
void rmsnorm_bwd_add(const te_fl_context& ctx, const te_fl_rmsnorm_bwd_add_args& a) {
  run_backward(ctx, {a.dz, a.x, a.add, nullptr, a.rsigma, a.gamma, a.dx, a.dgamma, nullptr,
                     a.zero_centered_gamma != 0});
}
Refusal refuse_rmsnorm_bwd_add(const te_fl_rmsnorm_bwd_add_args& a) {
  return refuse_backward(a, a.add, true);
}

template <class Args, auto F, auto Refuses, auto Workspace>
void append(std::vector<te_fl_op_desc>& ops, const char* name, uint32_t version = 1) {
  ops.push_back(descriptor<Args, F, Refuses>(name));
  ops.back().workspace = backend::workspace_thunk<Args, Workspace>;
  ops.back().param_version = version;
}

}  // namespace

void append_norm(std::vector<te_fl_op_desc>& ops) {
  // Version 2: residual and sum of the forwards, add of layernorm_bwd.
  append<te_fl_layernorm_fwd_args, layernorm_fwd, refuse_layernorm_fwd,
         forward_workspace<te_fl_layernorm_fwd_args>>(ops, "layernorm_fwd", 2);
  append<te_fl_layernorm_bwd_args, layernorm_bwd, refuse_layernorm_bwd,
         backward_workspace<te_fl_layernorm_bwd_args>>(ops, "layernorm_bwd", 2);
  append<te_fl_rmsnorm_fwd_args, rmsnorm_fwd, refuse_rmsnorm_fwd,
         forward_workspace<te_fl_rmsnorm_fwd_args>>(ops, "rmsnorm_fwd", 2);
  append<te_fl_rmsnorm_bwd_args, rmsnorm_bwd, refuse_rmsnorm_bwd,
         backward_workspace<te_fl_rmsnorm_bwd_args>>(ops, "rmsnorm_bwd");
  append<te_fl_rmsnorm_bwd_add_args, rmsnorm_bwd_add, refuse_rmsnorm_bwd_add,
         backward_workspace<te_fl_rmsnorm_bwd_add_args>>(ops, "rmsnorm_bwd_add");
}

}  // namespace te_fl::cuda
