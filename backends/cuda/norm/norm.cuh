// Device code shared by the norm kernels: access to rows in groups of eight elements, and row
// statistics that can be merged without cancellation. Also declares the functions that launch the
// fused kernels.
#pragma once

#include "common/store.cuh"
#include "device/device_attributes.hpp"
#include "device/shared_memory.hpp"
#include "norm/norm_choice.hpp"

namespace te_fl::cuda {

// The result that a fused forward kernel computes in addition to mu and rsigma: none, the amax of
// z, or z.
enum class RowTask { kStatistics, kAmax, kStore };

// Each function supports the calls for which choose_norm() (norm_choice.hpp) selects it, and
// enqueues on the stream of `ctx`.
//
// Keeps entire rows in registers. Computes the statistics and, depending on `task`, the amax of the
// result or the result, either unquantised or as row-wise FP8 with per-tensor scaling. `rest`:
// receives the exact mean minus mu, its FP32 rounding; may be NULL.
void norm_rowwise(const te_fl_context& ctx, const NormForward& f, RowTask task, float* rest,
                  float* amax, const Quantised* out);
// Requires a 16-bit x, weights of the same dtype, and no residual. Computes the statistics, and the
// amax or the unquantised result. `tiles`: receives the per-row values that norm_block128() needs;
// may be NULL.
void norm_plain16(const te_fl_context& ctx, const NormForward& f, float4* tiles, float* amax);
// Writes FP8 in tiles of 128 x 128, row-wise and column-wise. With 128-element block scaling it
// reads x once. With current per-tensor scaling (out.found), norm_plain16() has already written its
// `tiles` to the start of `scratch`. `scratch` must have norm_block128_bytes().
void norm_block128(const te_fl_context& ctx, const NormForward& f, const Quantised& out,
                   void* scratch);
size_t norm_block128_bytes(int64_t rows);
// Writes FP8 with per-tensor scaling, row-wise and column-wise. Each cluster of thread blocks holds
// some rows in registers.
void norm_cluster(const te_fl_context& ctx, const NormForward& f, const Quantised& out);
bool grants_tiles(int device, const NormCluster& cluster);  // implements NormDevice::grants
// Computes dx, dgamma and dbeta in two launches. `partials` must have norm_grad_bytes().
void norm_grad(const te_fl_context& ctx, const NormBackward& b, float* partials);
size_t norm_grad_bytes(int64_t rows, int64_t cols);

static_assert(norm_choice::kGroupSize == kGroup);

// Allows a kernel `wanted` bytes of dynamic shared memory. choose_norm() has already checked that
// the device has them.
template <class Kernel>
void take_shared(SharedMemory& granted, int device, Kernel* kernel, int64_t wanted, int64_t most) {
  if (granted.allow(device, kernel, static_cast<size_t>(wanted), static_cast<size_t>(most))) return;
  throw backend::Error(TE_FL_INTERNAL, "a norm kernel wants " + std::to_string(wanted) +
                                           " bytes of shared memory, more than choose_norm() knew "
                                           "of; report this with the GPU's name");
}

// Eight elements as stored in memory.
template <class T>
struct alignas(16) Raw {
  uint4 part[sizeof(T) / 2] = {};
};
template <class T>
__device__ inline Raw<T> load_raw(const T* p) {
  Raw<T> raw;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) {
    raw.part[i] = reinterpret_cast<const uint4*>(p)[i];
  }
  return raw;
}
template <class T>
__device__ inline void store_raw(T* p, const Raw<T>& raw) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) {
    store_whole(reinterpret_cast<uint4*>(p) + i, raw.part[i]);
  }
}
// Asynchronous copies from global to shared memory. Each thread waits for its own copies and reads
// only what it copied, so no barrier is needed. A piece has 16 bytes per thread of the block; a
// stage consists of the pieces of one row.
struct Staged {
  uint4* mine;  // this thread's part of piece 0 of stage 0
  int pieces;   // number of pieces per stage
  __device__ uint4* at(int stage, int piece) const {
    return mine + (stage * pieces + piece) * static_cast<int>(blockDim.x);
  }
  // Returns the cache policy "evict first" for the L2 cache.
  static __device__ uint64_t first_out() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
  }
  // Starts the copy of eight elements at `from` into a piece. kOnce: the data will not be read
  // again soon, so L2 evicts it first and keeps written data longer.
  template <bool kOnce, class T>
  __device__ void copy(int stage, int piece, const T* from) const {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) {
      const auto to = static_cast<unsigned>(__cvta_generic_to_shared(at(stage, piece + i)));
      if constexpr (kOnce) {
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to),
                     "l"(reinterpret_cast<const uint4*>(from) + i), "l"(first_out())
                     : "memory");
      } else {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to),
                     "l"(reinterpret_cast<const uint4*>(from) + i)
                     : "memory");
      }
    }
  }
  template <class T>
  __device__ Raw<T> read(int stage, int piece) const {
    Raw<T> raw;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) raw.part[i] = *at(stage, piece + i);
    return raw;
  }
};
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the last kPending groups of copies are complete.
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Kernels compute half a group at a time, so that the live values fit the registers.
constexpr int kHalf = kGroup / 2;
template <class T>
__device__ inline void unpack(const Raw<T>& raw, int half, float (&v)[kHalf]) {
  const T* values = reinterpret_cast<const T*>(raw.part) + half * kHalf;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) v[i] = to_f32(values[i]);
}
template <class T>
__device__ inline void pack(const float (&v)[kHalf], int half, Raw<T>& raw) {
  T* values = reinterpret_cast<T*>(raw.part) + half * kHalf;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) values[i] = from_f32<T>(v[i]);
}
// x += other, rounded to T.
template <class T>
__device__ inline void add_raw(Raw<T>& x, const Raw<T>& other) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float a[kHalf], b[kHalf];
    unpack(x, half, a);
    unpack(other, half, b);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) a[i] += b[i];
    pack(a, half, x);
  }
}

// Stores the weights of `groups` groups in shared memory as FP32. The first four of every group
// come before all the last four, so that adjacent lanes read adjacent vectors.
__device__ inline void put_weights(float* shared, int groups, int group, const float* v) {
  float4* at = reinterpret_cast<float4*>(shared);
  at[group] = make_float4(v[0], v[1], v[2], v[3]);
  at[groups + group] = make_float4(v[4], v[5], v[6], v[7]);
}
__device__ inline void get_weights(const float* shared, int groups, int group, int half,
                                   float (&v)[kHalf]) {
  const float4 four = reinterpret_cast<const float4*>(shared)[half * groups + group];
  v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
}
// Loads gamma + offset and beta (0 if absent) from column `first` into shared memory. All threads
// of the block must call it.
__device__ inline void stage_weights(const Source& gamma, const Source& beta, float offset,
                                     int64_t first, int groups, float* g_shared, float* b_shared) {
  for (int i = static_cast<int>(threadIdx.x); i < groups; i += static_cast<int>(blockDim.x)) {
    float v[kGroup];
    gamma.load(first + i * kGroup, kGroup, v);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) v[j] += offset;
    put_weights(g_shared, groups, i, v);
    if (b_shared == nullptr) continue;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) v[j] = 0.0f;
    if (beta.data != nullptr) beta.load(first + i * kGroup, kGroup, v);
    put_weights(b_shared, groups, i, v);
  }
}

// Statistics of n elements x of a row: the sums of x - centre and of (x - centre)^2.
struct Moments {
  float centre, sum, squares, n;
};
// Statistics of a row. The mean is high + rest (two floats), so x - mean is computed as (x - high)
// - rest.
struct RowStatistics {
  float high, rest, rsigma;
};
// The sum over each aligned group of kLanes adjacent lanes; every lane receives its group's sum.
// kLanes is a power of two.
template <int kLanes>
__device__ inline float lanes_sum(float v) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
  return v;
}
// Returns the sum of `a` over all 32 lanes to the lower 16 lanes, and the sum of `b` over all 32
// lanes to the upper 16 lanes.
__device__ inline float two_sums(float a, float b) {
  const bool upper = threadIdx.x % 32 >= 16;
  const float other = __shfl_xor_sync(0xFFFFFFFFu, upper ? a : b, 16);
  return lanes_sum<16>((upper ? b : a) + other);
}
// Merges the Moments of kLanes adjacent lanes into the statistics of a row, which all these lanes
// receive.
template <int kLanes>
__device__ inline RowStatistics merge(const Moments& m, float inverse_cols, float epsilon,
                                      bool centred) {
  RowStatistics s{0.0f, 0.0f, 0.0f};
  float squares = m.squares;
  if (centred) {
    s.high = kLanes == 1 ? m.centre : lanes_sum<kLanes>(m.n * m.centre) * inverse_cols;
    const float d = m.centre - s.high;
    squares = lanes_sum<kLanes>(fmaf(d, fmaf(m.n, d, 2.0f * m.sum), squares));
    const float sum = lanes_sum<kLanes>(fmaf(m.n, d, m.sum));
    s.rest = sum * inverse_cols;
    squares = fmaf(-sum, s.rest, squares);
  } else {
    squares = lanes_sum<kLanes>(squares);
  }
  squares = squares < 0.0f ? 0.0f : squares * inverse_cols;  // NaN is kept
  s.rsigma = rsqrtf(squares + epsilon);
  return s;
}

// Converts four values to FP8 and packs them into a word; the first is in the lowest byte. NaN
// becomes 0x7F.
__device__ inline uint32_t encode(const float (&v)[kHalf], bool is_e5m2) {
  return encode_four(v[0], v[1], v[2], v[3], is_e5m2);
}

}  // namespace te_fl::cuda
