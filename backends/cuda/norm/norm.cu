// The layernorm and rmsnorm ops. choose_norm() (norm_choice.hpp) selects the kernels of a call.
#include "te_fl/ops/norm.h"

#include "common/overlap.hpp"
#include "norm/norm.cuh"
#include "norm/norm_choice.hpp"
#include "norm/norm_general.cuh"
#include "plugin/families.hpp"
#include "te_fl/backend/describe.hpp"

namespace te_fl::cuda {

namespace {

unsigned row_blocks(int64_t rows) {
  return static_cast<unsigned>(
      std::clamp<int64_t>(rows, 1, int64_t{32} * current_multiprocessors()));
}

NormDevice describe_device(const te_fl_context& ctx) {
  const int device = ctx.device.index;
  return {device, compute_capability(device),
          attribute_of<cudaDevAttrMaxSharedMemoryPerBlockOptin>(device), grants_tiles};
}

// Computes an unquantised output and the statistics in one pass over x, for any dtypes.
void norm_general_rows(const te_fl_context& ctx, const NormForward& f) {
  const backend::Matrix m = backend::as_matrix(*f.x);
  const auto kernel = m.cols <= kRegisterCols / 4   ? norm_general_rows_kernel<1>
                      : m.cols <= kRegisterCols / 2 ? norm_general_rows_kernel<2>
                                                    : norm_general_rows_kernel<4>;
  kernel<<<static_cast<unsigned>(m.rows), kThreads, 0, stream_of(ctx)>>>(
      Source(*f.x), Source(*f.gamma), f.beta != nullptr ? Source(*f.beta) : Source(), Target(*f.z),
      m.cols, f.epsilon, f.zero_centered ? 1.0f : 0.0f,
      f.mu != nullptr ? backend::data<float>(*f.mu) : nullptr, backend::data<float>(*f.rsigma));
  check_launch("norm_general_rows_kernel");
}

float* upper_workspace(const te_fl_context& ctx) {
  return reinterpret_cast<float*>(static_cast<char*>(ctx.workspace) + kStoreWorkspace);
}

// Writes mu and rsigma and, if the call has a residual, `sum`.
void forward_statistics(const te_fl_context& ctx, NormForward f, NormKernel kernel) {
  if (kernel == NormKernel::kRowwise) {
    return norm_rowwise(ctx, f, RowTask::kStatistics, upper_workspace(ctx), nullptr, nullptr);
  }
  const backend::Matrix m = backend::as_matrix(*f.x);
  if (f.sum != nullptr) {
    store_output(ctx, *f.sum, AddPair{Source(*f.x), Source(*f.residual), m.cols});
    f = summed(f);
  }
  if (m.rows == 0) return;
  norm_statistics_kernel<<<row_blocks(m.rows), kThreads, 0, stream_of(ctx)>>>(
      Source(*f.x), m.rows, m.cols, f.epsilon,
      f.mu != nullptr ? backend::data<float>(*f.mu) : nullptr, upper_workspace(ctx),
      backend::data<float>(*f.rsigma));
  check_launch("norm_statistics_kernel");
}

// Writes mu and rsigma and computes the amax of the result. Returns the device address of the amax.
float* forward_amax(const te_fl_context& ctx, const NormForward& f, NormKernel kernel) {
  auto* found = static_cast<float*>(ctx.workspace);
  check(cudaMemsetAsync(found, 0, sizeof(float), stream_of(ctx)), "cudaMemsetAsync");
  if (kernel == NormKernel::kPlain16) {
    norm_plain16(ctx, f, reinterpret_cast<float4*>(upper_workspace(ctx)), found);
  } else {
    norm_rowwise(ctx, f, RowTask::kAmax, upper_workspace(ctx), found, nullptr);
  }
  return found;
}

// Writes the result z. The statistics must already be computed.
void norm_general(const te_fl_context& ctx, const NormForward& f) {
  store_output(
      ctx, *f.z,
      Normalise{Source(*f.x), Source(*f.gamma), f.beta != nullptr ? Source(*f.beta) : Source(),
                f.mu != nullptr ? backend::data<float>(*f.mu) : nullptr, upper_workspace(ctx),
                backend::data<float>(*f.rsigma), backend::as_matrix(*f.x).cols,
                f.zero_centered ? 1.0f : 0.0f});
}

void run_forward(const te_fl_context& ctx, const NormForward& f) {
  const NormChoice choice = choose_norm(f, describe_device(ctx));
  const bool codes = backend::scaling(*f.z) != TE_FL_SCALING_NONE;
  Quantised q = codes ? quantised(*f.z, nullptr, FLT_MAX) : Quantised();
  NormForward left = f;
  if (choice.first != NormKernel::kNone) {
    if (choice.amax) {
      q.found = forward_amax(ctx, f, choice.first);
    } else {
      forward_statistics(ctx, f, choice.first);
    }
    left = summed(f);
  }
  switch (choice.result) {
    case NormKernel::kPlain16:
      return norm_plain16(ctx, left, nullptr, nullptr);
    case NormKernel::kRowwise:
      return norm_rowwise(ctx, left, RowTask::kStore, nullptr, nullptr, codes ? &q : nullptr);
    case NormKernel::kCluster:
      return norm_cluster(ctx, left, q);
    case NormKernel::kBlock128:
      return norm_block128(ctx, left, q, upper_workspace(ctx));
    case NormKernel::kGeneralRows:
      return norm_general_rows(ctx, left);
    default:
      return norm_general(ctx, left);
  }
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

NormForward make_call(const te_fl_layernorm_fwd_args& a) {
  return {a.x,      a.gamma,    a.beta, a.z,       a.mu,
          a.rsigma, a.residual, a.sum,  a.epsilon, a.zero_centered_gamma != 0};
}
NormForward make_call(const te_fl_rmsnorm_fwd_args& a) {
  return {a.x,      a.gamma,    nullptr, a.z,       nullptr,
          a.rsigma, a.residual, a.sum,   a.epsilon, a.zero_centered_gamma != 0};
}
NormBackward make_call(const te_fl_layernorm_bwd_args& a) {
  return {a.dz,    a.x,  a.add,    a.mu,    a.rsigma,
          a.gamma, a.dx, a.dgamma, a.dbeta, a.zero_centered_gamma != 0};
}
NormBackward make_call(const te_fl_rmsnorm_bwd_args& a) {
  return {a.dz,    a.x,  nullptr,  nullptr, a.rsigma,
          a.gamma, a.dx, a.dgamma, nullptr, a.zero_centered_gamma != 0};
}
NormBackward make_call(const te_fl_rmsnorm_bwd_add_args& a) {
  return {a.dz,    a.x,  a.add,    nullptr, a.rsigma,
          a.gamma, a.dx, a.dgamma, nullptr, a.zero_centered_gamma != 0};
}

template <class Args>
std::string describe_choice(const te_fl_context& ctx, const Args& a) {
  const DeviceGuard guard(ctx.device.index);
  return "norm kernel " + choose_norm(make_call(a), describe_device(ctx)).text();
}

void layernorm_fwd(const te_fl_context& ctx, const te_fl_layernorm_fwd_args& a) {
  run_forward(ctx, make_call(a));
}
Refusal refuse_layernorm_fwd(const te_fl_layernorm_fwd_args& a) {
  return refuse_forward(a, all_dense(a.gamma, a.beta, a.mu, a.rsigma));
}
void rmsnorm_fwd(const te_fl_context& ctx, const te_fl_rmsnorm_fwd_args& a) {
  run_forward(ctx, make_call(a));
}
Refusal refuse_rmsnorm_fwd(const te_fl_rmsnorm_fwd_args& a) {
  return refuse_forward(a, all_dense(a.gamma, a.rsigma));
}
template <class Args>
size_t forward_workspace(const te_fl_context&, const Args& a) {
  const int64_t rows = backend::as_matrix(*a.x).rows;
  return kStoreWorkspace + (backend::scaling(*a.z) == TE_FL_SCALING_NONE
                                ? static_cast<size_t>(rows) * sizeof(float)
                                : norm_block128_bytes(rows));
}

// ---- backward

size_t means_bytes(int64_t rows) {
  return static_cast<size_t>(round_up(2 * rows * static_cast<int64_t>(sizeof(float)), 256));
}
template <class Args>
size_t backward_workspace(const te_fl_context&, const Args& a) {
  const backend::Matrix m = backend::as_matrix(*a.x);
  const size_t general = means_bytes(m.rows) + column_sums_bytes(m.rows, m.cols);
  return kStoreWorkspace + std::max(general, norm_grad_bytes(m.rows, m.cols));
}

void run_backward(const te_fl_context& ctx, const NormBackward& b) {
  const backend::Matrix m = backend::as_matrix(*b.x);
  char* scratch = static_cast<char*>(ctx.workspace) + kStoreWorkspace;
  if (choose_norm(b, describe_device(ctx)).result == NormKernel::kGrad) {
    return norm_grad(ctx, b, reinterpret_cast<float*>(scratch));
  }
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
  // Computes the column sums first, because dx may share the memory of dz.
  column_sums(ctx, m.rows, m.cols, partials, *b.dgamma, false, GradientOfGamma{args});
  if (b.dbeta != nullptr) {
    column_sums(ctx, m.rows, m.cols, partials, *b.dbeta, false, GradientOfBeta{args.dz, m.cols});
  }
  if (m.rows == 0 || m.cols == 0) return;
  norm_row_means_kernel<<<row_blocks(m.rows), kThreads, 0, stream_of(ctx)>>>(args, m.rows, means);
  check_launch("norm_row_means_kernel");
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
  run_backward(ctx, make_call(a));
}
Refusal refuse_layernorm_bwd(const te_fl_layernorm_bwd_args& a) {
  return refuse_backward(a, a.add, all_dense(a.mu, a.dbeta));
}
void rmsnorm_bwd(const te_fl_context& ctx, const te_fl_rmsnorm_bwd_args& a) {
  run_backward(ctx, make_call(a));
}
Refusal refuse_rmsnorm_bwd(const te_fl_rmsnorm_bwd_args& a) {
  return refuse_backward(a, nullptr, true);
}
void rmsnorm_bwd_add(const te_fl_context& ctx, const te_fl_rmsnorm_bwd_add_args& a) {
  run_backward(ctx, make_call(a));
}
Refusal refuse_rmsnorm_bwd_add(const te_fl_rmsnorm_bwd_add_args& a) {
  return refuse_backward(a, a.add, true);
}

template <class Args, auto F, auto Refuses, auto Workspace>
void append(std::vector<te_fl_op_desc>& ops, const char* name, const char* later = nullptr) {
  ops.push_back(descriptor<Args, F, Refuses>(name));
  ops.back().workspace = backend::workspace_thunk<Args, Workspace>;
  ops.back().later_args = later;
  ops.back().describe = backend::describe_thunk<Args, describe_choice<Args>>;
}

}  // namespace

void append_norm(std::vector<te_fl_op_desc>& ops) {
  append<te_fl_layernorm_fwd_args, layernorm_fwd, refuse_layernorm_fwd,
         forward_workspace<te_fl_layernorm_fwd_args>>(ops, "layernorm_fwd", "residual sum");
  append<te_fl_layernorm_bwd_args, layernorm_bwd, refuse_layernorm_bwd,
         backward_workspace<te_fl_layernorm_bwd_args>>(ops, "layernorm_bwd", "add");
  append<te_fl_rmsnorm_fwd_args, rmsnorm_fwd, refuse_rmsnorm_fwd,
         forward_workspace<te_fl_rmsnorm_fwd_args>>(ops, "rmsnorm_fwd", "residual sum");
  append<te_fl_rmsnorm_bwd_args, rmsnorm_bwd, refuse_rmsnorm_bwd,
         backward_workspace<te_fl_rmsnorm_bwd_args>>(ops, "rmsnorm_bwd");
  append<te_fl_rmsnorm_bwd_add_args, rmsnorm_bwd_add, refuse_rmsnorm_bwd_add,
         backward_workspace<te_fl_rmsnorm_bwd_add_args>>(ops, "rmsnorm_bwd_add");
}

}  // namespace te_fl::cuda
