// Layer and RMS normalisation. Statistics in FP32 by two passes, the second of which corrects the
// mean; sums over rows in two stages, in a fixed order.
#include "te_fl/ops/norm.h"

#include "families.hpp"
#include "overlap.hpp"
#include "store.cuh"

namespace te_fl::cuda {
namespace {

__device__ inline float block_sum(float v, float* shared) {
  v = warp_sum(v);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[warp] = v;
  __syncthreads();
  v = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) v += shared[i];
  return v;
}

// One block a row. mu NULL: no centring. rest: what mu, rounded to FP32, leaves out.
__global__ void __launch_bounds__(kThreads)
    statistics_kernel(Source x, int64_t rows, int64_t cols, float epsilon, float* mu, float* rest,
                      float* rsigma) {
  __shared__ float shared[kThreads / 32];
  const int64_t groups = (cols + kGroup - 1) / kGroup;
  const float inverse = cols == 0 ? 0.0f : 1.0f / static_cast<float>(cols);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const auto each = [&](auto f) {
      for (int64_t g = threadIdx.x; g < groups; g += kThreads) {
        const int64_t col = g * kGroup;
        const int n = static_cast<int>(cols - col < kGroup ? cols - col : kGroup);
        float v[kGroup];
        x.load(row * cols + col, n, v);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          if (i < n) f(v[i]);
        }
      }
    };
    float centre = 0.0f;
    if (mu != nullptr) {
      float sum = 0.0f;
      each([&](float v) { sum += v; });
      centre = block_sum(sum, shared) * inverse;
    }
    float sum = 0.0f, squares = 0.0f;
    each([&](float v) {
      sum += v - centre;
      squares = fmaf(v - centre, v - centre, squares);
    });
    squares = block_sum(squares, shared) * inverse;
    float shift = 0.0f;
    if (mu != nullptr) {
      shift = block_sum(sum, shared) * inverse;
      squares -= shift * shift;
    }
    if (threadIdx.x == 0) {
      if (mu != nullptr) {
        mu[row] = centre + shift;
        rest[row] = (centre - mu[row]) + shift;
      }
      rsigma[row] = 1.0f / sqrtf(fmaxf(squares, 0.0f) + epsilon);
    }
  }
}

// z = (x - mu) rsigma g + beta
struct Normalise {
  Source x, gamma, beta;
  const float *mu, *rest, *rsigma;
  int64_t cols;
  float offset;  // of gamma

  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    float g[kGroup], b[kGroup] = {};
    x.load(row * cols + col, n, v);
    gamma.load(col, n, g);
    if (beta.data != nullptr) beta.load(col, n, b);
    const float r = rsigma[row];
    const float centre = mu != nullptr ? mu[row] : 0.0f, more = mu != nullptr ? rest[row] : 0.0f;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      v[i] = fmaf(((v[i] - centre) - more) * r, g[i] + offset, b[i]);
    }
  }
};

// Both of the above in one pass for unquantised outputs: a block keeps its row in registers.
template <int kGroups>  // that a thread holds
__global__ void __launch_bounds__(kThreads)
    normalise_rows_kernel(Source x, Source gamma, Source beta, Target z, int64_t cols,
                          float epsilon, float offset, float* mu, float* rsigma) {
  __shared__ float shared[kThreads / 32];
  const int64_t row = blockIdx.x;
  const float inverse = 1.0f / static_cast<float>(cols);
  float v[kGroups][kGroup];
  const auto each = [&](auto f) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int64_t col = (int64_t{g} * kThreads + threadIdx.x) * kGroup;
      if (col < cols) f(v[g], col, static_cast<int>(cols - col < kGroup ? cols - col : kGroup));
    }
  };
  float sum = 0.0f, squares = 0.0f, centre = 0.0f, shift = 0.0f;
  each([&](float* group, int64_t col, int n) {
    x.load(row * cols + col, n, group);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) sum += i < n ? group[i] : 0.0f;
  });
  if (mu != nullptr) centre = block_sum(sum, shared) * inverse;
  sum = 0.0f;
  each([&](float* group, int64_t, int n) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (i >= n) continue;
      group[i] -= centre;
      sum += group[i];
      squares = fmaf(group[i], group[i], squares);
    }
  });
  squares = block_sum(squares, shared) * inverse;
  if (mu != nullptr) {
    shift = block_sum(sum, shared) * inverse;
    squares -= shift * shift;
  }
  const float r = 1.0f / sqrtf(fmaxf(squares, 0.0f) + epsilon);
  if (threadIdx.x == 0) {
    if (mu != nullptr) mu[row] = centre + shift;
    rsigma[row] = r;
  }
  each([&](float* group, int64_t col, int n) {
    float g[kGroup], b[kGroup] = {};
    gamma.load(col, n, g);
    if (beta.data != nullptr) beta.load(col, n, b);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      group[i] = fmaf((group[i] - shift) * r, g[i] + offset, b[i]);
    }
    z.store(row * cols + col, n, group);
  });
}
constexpr int64_t kRegisterCols = int64_t{kThreads} * kGroup * 4;

unsigned row_blocks(int64_t rows) {
  return static_cast<unsigned>(std::max<int64_t>(1, std::min<int64_t>(rows, 132 * 32)));
}

void check_epsilon(float epsilon) {
  if (!(epsilon >= 0.0f)) {
    backend::invalid("epsilon is " + std::to_string(epsilon) + "; it must be 0 or more");
  }
}

struct Forward {
  const te_fl_tensor *x, *gamma, *beta, *z, *mu, *rsigma;
  float epsilon;
  bool zero_centered;
};

void run_forward(const te_fl_context& ctx, const Forward& f) {
  check_epsilon(f.epsilon);
  check_output(*f.z, "z");
  const backend::Matrix m = backend::as_matrix(*f.x);
  float* mu = f.mu != nullptr ? backend::data<float>(*f.mu) : nullptr;
  if (backend::scaling(*f.z) == TE_FL_SCALING_NONE && m.rows > 0 && m.rows <= INT32_MAX &&
      m.cols > 0 && m.cols <= kRegisterCols) {
    const auto kernel = m.cols <= kRegisterCols / 4   ? normalise_rows_kernel<1>
                        : m.cols <= kRegisterCols / 2 ? normalise_rows_kernel<2>
                                                      : normalise_rows_kernel<4>;
    kernel<<<static_cast<unsigned>(m.rows), kThreads, 0, stream_of(ctx)>>>(
        Source(*f.x), Source(*f.gamma), f.beta != nullptr ? Source(*f.beta) : Source(),
        Target(*f.z), m.cols, f.epsilon, f.zero_centered ? 1.0f : 0.0f, mu,
        backend::data<float>(*f.rsigma));
    return check_launch("normalise_rows_kernel");
  }
  auto* rest = reinterpret_cast<float*>(static_cast<char*>(ctx.workspace) + kStoreWorkspace);
  auto* rsigma = backend::data<float>(*f.rsigma);
  if (m.rows > 0) {
    statistics_kernel<<<row_blocks(m.rows), kThreads, 0, stream_of(ctx)>>>(
        Source(*f.x), m.rows, m.cols, f.epsilon, mu, rest, rsigma);
    check_launch("statistics_kernel");
  }
  const Normalise z{Source(*f.x),
                    Source(*f.gamma),
                    f.beta != nullptr ? Source(*f.beta) : Source(),
                    mu,
                    rest,
                    rsigma,
                    m.cols,
                    f.zero_centered ? 1.0f : 0.0f};
  store_output(ctx, *f.z, z);
}

Refusal refuse_forward(const te_fl_tensor& x, const te_fl_tensor& z, bool dense_rest) {
  if (!dense(&x) || !dense_rest) return kNotContiguous;
  if (const Refusal why = refuse_output(z)) return why;
  return overlaps_askew(z, x) ? kOverlaps : nullptr;
}

void layernorm_fwd(const te_fl_context& ctx, const te_fl_layernorm_fwd_args& a) {
  run_forward(ctx,
              {a.x, a.gamma, a.beta, a.z, a.mu, a.rsigma, a.epsilon, a.zero_centered_gamma != 0});
}
Refusal refuse_layernorm_fwd(const te_fl_layernorm_fwd_args& a) {
  return refuse_forward(*a.x, *a.z, all_dense(a.gamma, a.beta, a.mu, a.rsigma));
}
void rmsnorm_fwd(const te_fl_context& ctx, const te_fl_rmsnorm_fwd_args& a) {
  run_forward(
      ctx, {a.x, a.gamma, nullptr, a.z, nullptr, a.rsigma, a.epsilon, a.zero_centered_gamma != 0});
}
Refusal refuse_rmsnorm_fwd(const te_fl_rmsnorm_fwd_args& a) {
  return refuse_forward(*a.x, *a.z, all_dense(a.gamma, a.rsigma));
}
template <class Args>
size_t forward_workspace(const te_fl_context&, const Args& a) {
  return kStoreWorkspace + static_cast<size_t>(backend::as_matrix(*a.x).rows) * sizeof(float);
}

// ---- backward

// The operands of both gradients; n = (x - mu) rsigma, d = dz g.
struct Gradient {
  Source dz, x, gamma, add;
  const float *mu, *rsigma;
  int64_t cols;
  float offset;

  // n and d of a group.
  __device__ void load(int64_t row, int64_t col, int count, float* n, float* d) const {
    float g[kGroup];
    x.load(row * cols + col, count, n);
    dz.load(row * cols + col, count, d);
    gamma.load(col, count, g);
    const float centre = mu != nullptr ? mu[row] : 0.0f, r = rsigma[row];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      n[i] = (n[i] - centre) * r;
      d[i] *= g[i] + offset;
    }
  }
};

// means[2 row] = mean(d) (0 without centring), means[2 row + 1] = mean(d n).
__global__ void __launch_bounds__(kThreads)
    row_means_kernel(Gradient args, int64_t rows, float* means) {
  __shared__ float shared[kThreads / 32];
  const int64_t cols = args.cols, groups = (cols + kGroup - 1) / kGroup;
  const float inverse = cols == 0 ? 0.0f : 1.0f / static_cast<float>(cols);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    float sum_d = 0.0f, sum_dn = 0.0f;
    for (int64_t g = threadIdx.x; g < groups; g += kThreads) {
      const int64_t col = g * kGroup;
      const int count = static_cast<int>(cols - col < kGroup ? cols - col : kGroup);
      float n[kGroup], d[kGroup];
      args.load(row, col, count, n, d);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (i >= count) continue;
        sum_d += d[i];
        sum_dn = fmaf(d[i], n[i], sum_dn);
      }
    }
    sum_dn = block_sum(sum_dn, shared);
    if (args.mu != nullptr) sum_d = block_sum(sum_d, shared);
    if (threadIdx.x == 0) {
      means[2 * row] = args.mu != nullptr ? sum_d * inverse : 0.0f;
      means[2 * row + 1] = sum_dn * inverse;
    }
  }
}

struct GradientOfInput {
  Gradient args;
  const float* means;
  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    float normalised[kGroup], other[kGroup] = {};
    args.load(row, col, n, normalised, v);
    if (args.add.data != nullptr) args.add.load(row * args.cols + col, n, other);
    const float r = args.rsigma[row], mean_d = means[2 * row], mean_dn = means[2 * row + 1];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      v[i] = fmaf(r, (v[i] - mean_d) - normalised[i] * mean_dn, other[i]);
    }
  }
};
struct GradientOfGamma {
  Gradient args;
  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    float normalised[kGroup];
    args.x.load(row * args.cols + col, n, normalised);
    args.dz.load(row * args.cols + col, n, v);
    const float centre = args.mu != nullptr ? args.mu[row] : 0.0f, r = args.rsigma[row];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] *= (normalised[i] - centre) * r;
  }
};
struct GradientOfBeta {
  Source dz;
  int64_t cols;
  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    dz.load(row * cols + col, n, v);
  }
};

size_t means_bytes(int64_t rows) {
  return static_cast<size_t>(round_up(2 * rows * static_cast<int64_t>(sizeof(float)), 256));
}
template <class Args>
size_t backward_workspace(const te_fl_context&, const Args& a) {
  const backend::Matrix m = backend::as_matrix(*a.x);
  return kStoreWorkspace + means_bytes(m.rows) + column_sums_bytes(m.rows, m.cols);
}

struct Backward {
  const te_fl_tensor *dz, *x, *add, *mu, *rsigma, *gamma, *dx, *dgamma, *dbeta;
  bool zero_centered;
};

void run_backward(const te_fl_context& ctx, const Backward& b) {
  const backend::Matrix m = backend::as_matrix(*b.x);
  const Gradient args{Source(*b.dz),
                      Source(*b.x),
                      Source(*b.gamma),
                      b.add != nullptr ? Source(*b.add) : Source(),
                      b.mu != nullptr ? backend::data<const float>(*b.mu) : nullptr,
                      backend::data<const float>(*b.rsigma),
                      m.cols,
                      b.zero_centered ? 1.0f : 0.0f};
  char* scratch = static_cast<char*>(ctx.workspace) + kStoreWorkspace;
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
  run_backward(ctx, {a.dz, a.x, nullptr, a.mu, a.rsigma, a.gamma, a.dx, a.dgamma, a.dbeta,
                     a.zero_centered_gamma != 0});
}
Refusal refuse_layernorm_bwd(const te_fl_layernorm_bwd_args& a) {
  return refuse_backward(a, nullptr, all_dense(a.mu, a.dbeta));
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
void append(std::vector<te_fl_op_desc>& ops, const char* name) {
  ops.push_back(descriptor<Args, F, Refuses>(name));
  ops.back().workspace = backend::workspace_thunk<Args, Workspace>;
}

}  // namespace

void append_norm(std::vector<te_fl_op_desc>& ops) {
  append<te_fl_layernorm_fwd_args, layernorm_fwd, refuse_layernorm_fwd,
         forward_workspace<te_fl_layernorm_fwd_args>>(ops, "layernorm_fwd");
  append<te_fl_layernorm_bwd_args, layernorm_bwd, refuse_layernorm_bwd,
         backward_workspace<te_fl_layernorm_bwd_args>>(ops, "layernorm_bwd");
  append<te_fl_rmsnorm_fwd_args, rmsnorm_fwd, refuse_rmsnorm_fwd,
         forward_workspace<te_fl_rmsnorm_fwd_args>>(ops, "rmsnorm_fwd");
  append<te_fl_rmsnorm_bwd_args, rmsnorm_bwd, refuse_rmsnorm_bwd,
         backward_workspace<te_fl_rmsnorm_bwd_args>>(ops, "rmsnorm_bwd");
  append<te_fl_rmsnorm_bwd_add_args, rmsnorm_bwd_add, refuse_rmsnorm_bwd_add,
         backward_workspace<te_fl_rmsnorm_bwd_add_args>>(ops, "rmsnorm_bwd_add");
}

}  // namespace te_fl::cuda
