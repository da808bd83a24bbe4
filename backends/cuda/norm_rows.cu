// Forward norms whose rows stay in registers: x is read once, and nothing else but weights.
#include "norm.cuh"

namespace te_fl::cuda {
namespace {

constexpr int kRowThreads = 512, kRowWarps = kRowThreads / 32;

struct RowsArgs {
  const void *x, *residual;
  void *sum, *z;  // z: elements as x, or codes
  Source gamma, beta;
  float *mu, *rest, *rsigma, *amax;
  Quantised q;
  int64_t rows;
  int cols, warps;  // warps: that share a row, a power of two
  float epsilon, offset;
  bool centred, find_amax, e5m2;
};

// A row lies across `warps` warps, a block holds several; the blocks walk down the rows. kAhead:
// the next row is loaded before this one is finished.
template <class T, bool kCodes, int kGroups, bool kResidual, bool kAhead, int kBlocks>
__global__ void __launch_bounds__(kRowThreads, kBlocks) norm_rows_kernel(RowsArgs a) {
  extern __shared__ float4 dynamic[];
  __shared__ float4 parts[2][kRowWarps];
  float* const g_shared = reinterpret_cast<float*>(dynamic);
  float* const b_shared = g_shared + a.cols;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int slot = warp / a.warps, part = warp % a.warps, groups = a.cols / kGroup;
  const int64_t step = int64_t{gridDim.x} * (kRowWarps / a.warps);
  int64_t row = blockIdx.x * int64_t{kRowWarps / a.warps} + slot;

  const auto group_at = [&](int g) { return (g * a.warps + part) * 32 + lane; };
  const auto load = [&](const void* from, int64_t at, Raw<T>* to) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (group_at(g) < groups) {
        to[g] = load_raw(static_cast<const T*>(from) + at * a.cols + group_at(g) * kGroup);
      }
    }
  };
  Raw<T> x[kGroups], next[kGroups], other[kGroups];
  if (kAhead && row < a.rows) {
    load(a.x, row, x);
    if constexpr (kResidual) load(a.residual, row, other);
  }
  const bool stores = a.z != nullptr;
  float scale = 1.0f, most = 0.0f, n = 0.0f;
  if constexpr (kCodes) scale = tensor_scale(a.q, a.e5m2, blockIdx.x == 0 && threadIdx.x == 0);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int first = (g * a.warps + part) * 32;
    n += static_cast<float>(max(0, min(groups - first, 32)) * kGroup);
  }
  if (stores || a.find_amax) {
    stage_weights(a.gamma, a.beta, a.offset, 0, groups, g_shared, b_shared);
  }
  __syncthreads();

  for (int parity = 0; row < a.rows; row += step, parity ^= 1) {
    if constexpr (!kAhead) {
      load(a.x, row, x);
      if constexpr (kResidual) load(a.residual, row, other);
    }
    if constexpr (kResidual) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (group_at(g) >= groups) continue;
        add_raw(x[g], other[g]);
        store_raw(static_cast<T*>(a.sum) + row * a.cols + group_at(g) * kGroup, x[g]);
      }
    }
    if (kAhead && row + step < a.rows) {
      load(a.x, row + step, next);
      if constexpr (kResidual) load(a.residual, row + step, other);
    }
    Moments m{0.0f, 0.0f, 0.0f, n};
    const auto each = [&](auto f) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (group_at(g) >= groups) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float v[kHalf];
          unpack(x[g], half, v);
          f(v, g, half);
        }
      }
    };
    if (a.centred) {
      float sum = 0.0f;
      each([&](const float(&v)[kHalf], int, int) {
#pragma unroll
        for (int i = 0; i < kHalf; ++i) sum += v[i];
      });
      m.centre = n > 0.0f ? warp_sum(sum) / n : 0.0f;
    }
    each([&](const float(&v)[kHalf], int, int) {
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const float d = v[i] - m.centre;
        m.sum += d;
        m.squares = fmaf(d, d, m.squares);
      }
    });
    if (a.centred) m.sum = warp_sum(m.sum);
    m.squares = warp_sum(m.squares);
    if (a.warps > 1) {
      if (lane == 0) parts[parity][warp] = make_float4(m.centre, m.sum, m.squares, n);
      asm volatile("bar.sync %0, %1;" ::"r"(1 + slot), "r"(32 * a.warps) : "memory");
      const float4 p = parts[parity][slot * a.warps + (lane & (a.warps - 1))];
      m = {p.x, p.y, p.z, p.w};
    }
    const RowStatistics s = merge(m, a.warps, static_cast<float>(a.cols), a.epsilon, a.centred);
    if (part == 0 && lane == 0) {
      const float mu = s.high + s.rest;
      if (a.centred) a.mu[row] = mu;
      if (a.centred && a.rest != nullptr) a.rest[row] = (s.high - mu) + s.rest;
      a.rsigma[row] = s.rsigma;
    }
    if (stores || a.find_amax) {
      Raw<T> plain;
      uint32_t codes[2];
      each([&](float(&v)[kHalf], int g, int half) {
        float weight[kHalf], bias[kHalf];
        get_weights(g_shared, groups, group_at(g), half, weight);
        get_weights(b_shared, groups, group_at(g), half, bias);
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
          v[i] = fmaf(((v[i] - s.high) - s.rest) * s.rsigma, weight[i], bias[i]);
          if (a.find_amax) most = amax_of(most, v[i]);
          if constexpr (kCodes) v[i] *= scale;
        }
        if (!stores) return;
        const int64_t at = row * a.cols + group_at(g) * kGroup;
        if constexpr (kCodes) {
          codes[half] = encode(v, a.e5m2);
          if (half == 0) return;
          *reinterpret_cast<uint2*>(static_cast<uint8_t*>(a.z) + at) =
              make_uint2(codes[0], codes[1]);
        } else {
          pack(v, half, plain);
          if (half == 1) store_raw(static_cast<T*>(a.z) + at, plain);
        }
      });
    }
#pragma unroll
    for (int g = 0; kAhead && g < kGroups; ++g) x[g] = next[g];
  }
  if (a.find_amax) {
    most = warp_max(most);
    if (lane == 0) atomic_amax(a.amax, most);
  }
}

template <class T, bool kCodes, int kGroups, bool kResidual>
void launch(const te_fl_context& ctx, RowsArgs a) {
  constexpr int kRaw = kGroups * 2 * sizeof(T) * (kResidual ? 2 : 1);  // registers of a row
  constexpr bool kAhead = kRaw <= 16;
  constexpr int kBlocks = kGroups <= 2 && kAhead ? 2 : 1;
  const auto kernel = norm_rows_kernel<T, kCodes, kGroups, kResidual, kAhead, kBlocks>;
  static const cudaError_t allowed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(2 * kFusedCols * sizeof(float)));
  check(allowed, "cudaFuncSetAttribute");
  const int warps_needed = static_cast<int>(ceil_div(a.cols, kGroups * 32 * kGroup));
  a.warps = 1;
  while (a.warps < warps_needed) a.warps *= 2;
  const size_t shared = a.z != nullptr || a.find_amax ? 2 * sizeof(float) * a.cols : 0;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(
      ceil_div(a.rows, kRowWarps / a.warps), int64_t{kBlocks} * multiprocessors(ctx.device.index)));
  kernel<<<blocks, kRowThreads, shared, stream_of(ctx)>>>(a);
  check_launch("norm_rows_kernel");
}
template <class T, bool kCodes>
void launch_for(const te_fl_context& ctx, const RowsArgs& a) {
  constexpr int kFew = sizeof(T) == 2 ? 2 : 1;
  const bool few = a.cols <= kFew * kRowThreads * kGroup;
  if (a.residual != nullptr) {
    few ? launch<T, kCodes, kFew, true>(ctx, a) : launch<T, kCodes, 8 / sizeof(T), true>(ctx, a);
  } else {
    few ? launch<T, kCodes, kFew, false>(ctx, a) : launch<T, kCodes, 4, false>(ctx, a);
  }
}
template <class T>
void launch_codes(const te_fl_context& ctx, const RowsArgs& a, bool codes) {
  codes ? launch_for<T, true>(ctx, a) : launch_for<T, false>(ctx, a);
}

}  // namespace

bool forward_rows(const te_fl_context& ctx, const NormForward& f, RowTask task, float* rest,
                  float* amax, const Quantised* out) {
  const backend::Matrix m = backend::as_matrix(*f.x);
  const int dtype = dtype_of(*f.x);
  const te_fl_tensor* plain = task == RowTask::kStore && out == nullptr ? f.z : nullptr;
  const int64_t most = f.sum != nullptr && dtype == TE_FL_F32 ? kFusedCols / 2 : kFusedCols;
  if (m.rows == 0 || m.cols == 0 || m.cols % kGroup != 0 || m.cols > most ||
      !vectors_of(dtype, f.x, f.residual, f.sum, plain)) {
    return false;
  }
  RowsArgs a{};
  a.x = backend::data<const void>(*f.x);
  if (f.sum != nullptr) {
    a.residual = backend::data<const void>(*f.residual);
    a.sum = backend::data<void>(*f.sum);
  }
  a.gamma = Source(*f.gamma);
  if (f.beta != nullptr) a.beta = Source(*f.beta);
  a.mu = f.mu != nullptr ? backend::data<float>(*f.mu) : nullptr;
  a.rest = rest;
  a.rsigma = backend::data<float>(*f.rsigma);
  a.rows = m.rows;
  a.cols = static_cast<int>(m.cols);
  a.epsilon = f.epsilon;
  a.offset = f.zero_centered ? 1.0f : 0.0f;
  a.centred = f.mu != nullptr;
  a.e5m2 = dtype_of(*f.z) == TE_FL_F8E5M2;
  a.amax = amax;
  const bool codes = task == RowTask::kStore && out != nullptr;
  if (codes) {
    if (out->columns != nullptr || !aligned(out->rows, 8)) return false;
    a.q = *out;
    a.z = out->rows;
    a.amax = out->found == nullptr ? out->amax : nullptr;
  } else if (task == RowTask::kStore) {
    a.z = backend::data<void>(*f.z);
  }
  a.find_amax = a.amax != nullptr;
  if (dtype == TE_FL_BF16) {
    launch_codes<bf16>(ctx, a, codes);
  } else if (dtype == TE_FL_F16) {
    launch_codes<fp16>(ctx, a, codes);
  } else {
    launch_codes<float>(ctx, a, codes);
  }
  return true;
}

}  // namespace te_fl::cuda
