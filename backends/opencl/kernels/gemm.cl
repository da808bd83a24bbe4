// D = epilogue(alpha op(A) op(B) + bias) + residual + beta D. A group computes a TILE x TILE tile
// of D from slices of SLICE elements of K in local memory; a work-item computes 8 x 8 elements. TA,
// TB, TD, TBIAS, TOUT, TIN, TRES, TGRAD: dtypes of a, b, d, bias, pre_gelu_out, pre_gelu_in,
// residual, bias_grad. TRANS_A, TRANS_B: stored transposed.
#ifdef WIDE
#define SLICE 16  // the host defines TILE; VECTORS: rows start at multiples of four elements
#else
#define TILE 64
#define SLICE 32
#endif

#define HAS_BIAS 1
#define HAS_PRE_GELU_OUT 2
#define HAS_PRE_GELU_IN 4
#define HAS_RESIDUAL 8
#define GELU 16
#define ACCUMULATE 32
#define SCALED_A 64
#define SCALED_B 128
#define SCALED_IN 256
#define ACCUMULATE_GRAD 512

#define TWO_C 1.5957691216f  // 2 sqrt(2 / pi)

static float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }
static float gelu(float x) { return x * sigmoid(TWO_C * (x + 0.044715f * x * x * x)); }
static float d_gelu(float x) {
  if (fabs(x) > 64.0f) return x > 0.0f ? 1.0f : 0.0f;
  const float u = TWO_C * (x + 0.044715f * x * x * x), s = sigmoid(u);
  return s + x * s * sigmoid(-u) * TWO_C * (1.0f + 0.134145f * x * x);
}

static float8 load8(__global const void* data, long i, int type) {
  if (type == F32) return vload8(0, (__global const float*)data + i);
  if (type == BF16) {
    return as_float8(convert_uint8(vload8(0, (__global const ushort*)data + i)) << 16);
  }
  float values[8];
  for (int j = 0; j < 8; ++j) values[j] = load(data, i + j, type);
  return vload8(0, values);
}

// Applies the epilogue to the sum `v` of element (m, n), and writes the outputs.
static void apply_epilogue(float v, long m, long n, __global void* d, __global const void* bias,
                   __global void* pre_gelu_out, __global const void* pre_gelu_in,
                   __global const void* residual, __global const float* scale_a,
                   __global const float* scale_b, __global const float* scale_in, long n_extent,
                   float alpha, float beta, uint flags) {
  const long i = m * n_extent + n;
  if (flags & SCALED_A) v *= *scale_a;
  if (flags & SCALED_B) v *= *scale_b;
  v *= alpha;
  if (flags & HAS_BIAS) v += load(bias, n, TBIAS);
  if (flags & HAS_PRE_GELU_OUT) store(pre_gelu_out, i, TOUT, v);
  if (flags & GELU) v = gelu(v);
  if (flags & HAS_PRE_GELU_IN) {
    v *= d_gelu(load(pre_gelu_in, i, TIN) * (flags & SCALED_IN ? *scale_in : 1.0f));
  }
  if (flags & HAS_RESIDUAL) v += load(residual, i, TRES);
  if (flags & ACCUMULATE) v += beta * load(d, i, TD);
  store(d, i, TD, v);
}

#ifdef WIDE
// The kernel for devices that run work-items in parallel (GPUs). A group of (TILE / 8)^2 work-items
// computes a TILE x TILE tile. Work-item (i, j) computes rows 4 i to 4 i + 3 of the upper and the
// lower half of the tile, in columns 4 j to 4 j + 3 of its left and its right half, so that a slice
// is read in vectors of four without bank conflicts. The next slice is loaded during the
// computation.
#define ITEMS (TILE / 8 * TILE / 8)
#define LINE (TILE + 4)                   // floats from one k to the next
#define LOADS (TILE * SLICE / 4 / ITEMS)  // vectors of four that a work-item loads, per operand

static float4 load4(__global const void* data, long i, int type) {
#ifdef VECTORS
  if (type == F32) return *(__global const float4*)((__global const float*)data + i);
  if (type == BF16) {
    return as_float4(convert_uint4(*(__global const ushort4*)((__global const ushort*)data + i)) << 16);
  }
#endif
  return (float4)(load(data, i, type), load(data, i + 1, type), load(data, i + 2, type),
                  load(data, i + 3, type));
}

// Loads the i-th vector of a slice of op(X). `along` runs over the rows of op(A) or the columns of
// op(B). k_first: k is contiguous in memory; otherwise `along` is. Outside the matrix the result is
// 0.
static float4 fetch(__global const void* x, int i, bool k_first, long along0, long k0,
                    long along_extent, long k_extent, bool whole, int type) {
  const long k = k0 + (k_first ? i % (SLICE / 4) * 4 : i / (TILE / 4));
  const long at = along0 + (k_first ? i / (SLICE / 4) : i % (TILE / 4) * 4);
  const long from = k_first ? at * k_extent + k : k * along_extent + at;
  if (whole) return load4(x, from, type);
  float v[4];
  for (int j = 0; j < 4; ++j) {
    const bool inside = k + (k_first ? j : 0) < k_extent && at + (k_first ? 0 : j) < along_extent;
    v[j] = inside ? load(x, from + j, type) : 0.0f;
  }
  return (float4)(v[0], v[1], v[2], v[3]);
}

static void place(__local float* slice, int i, bool k_first, float4 v) {
  if (k_first) {
    const int k = i % (SLICE / 4) * 4, at = i / (SLICE / 4);
    slice[k * LINE + at] = v.x;
    slice[(k + 1) * LINE + at] = v.y;
    slice[(k + 2) * LINE + at] = v.z;
    slice[(k + 3) * LINE + at] = v.w;
  } else {
    *(__local float4*)(slice + i / (TILE / 4) * LINE + i % (TILE / 4) * 4) = v;
  }
}

__attribute__((reqd_work_group_size(ITEMS, 1, 1)))
__kernel void gemm(__global const void* a, __global const void* b, __global void* d,
                   __global const void* bias, __global void* pre_gelu_out,
                   __global const void* pre_gelu_in, __global const void* residual,
                   __global const float* scale_a, __global const float* scale_b,
                   __global const float* scale_in, long m_extent, long n_extent, long k_extent,
                   float alpha, float beta, uint flags) {
  __local float slice_a[SLICE * LINE] __attribute__((aligned(16)));
  __local float slice_b[SLICE * LINE] __attribute__((aligned(16)));
  const int id = get_local_id(0), y = id / (TILE / 8) * 4, x = id % (TILE / 8) * 4;
  const long tiles_n = (n_extent + TILE - 1) / TILE;
  const long m0 = (long)get_group_id(0) / tiles_n * TILE;
  const long n0 = (long)get_group_id(0) % tiles_n * TILE;
  const bool inside_m = m0 + TILE <= m_extent, inside_n = n0 + TILE <= n_extent;
  float4 sum[8][2];
  float4 next_a[LOADS], next_b[LOADS];
#pragma unroll
  for (int r = 0; r < 8; ++r) sum[r][0] = sum[r][1] = (float4)(0.0f);
#define FETCH(k0)                                                                                   \
  {                                                                                                 \
    const bool inside_k = (k0) + SLICE <= k_extent;                                                 \
    _Pragma("unroll") for (int l = 0; l < LOADS; ++l) {                                             \
      next_a[l] = fetch(a, id + l * ITEMS, !TRANS_A, m0, k0, m_extent, k_extent, inside_m && inside_k, TA); \
      next_b[l] = fetch(b, id + l * ITEMS, TRANS_B, n0, k0, n_extent, k_extent, inside_n && inside_k, TB);  \
    }                                                                                               \
  }
  FETCH(0)
  for (long k0 = 0; k0 < k_extent; k0 += SLICE) {
#pragma unroll
    for (int l = 0; l < LOADS; ++l) {
      place(slice_a, id + l * ITEMS, !TRANS_A, next_a[l]);
      place(slice_b, id + l * ITEMS, TRANS_B, next_b[l]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (k0 + SLICE < k_extent) FETCH(k0 + SLICE)
#pragma unroll
    for (int k = 0; k < SLICE; ++k) {
      const float4 a0 = *(__local const float4*)(slice_a + k * LINE + y);
      const float4 a1 = *(__local const float4*)(slice_a + k * LINE + TILE / 2 + y);
      const float4 b0 = *(__local const float4*)(slice_b + k * LINE + x);
      const float4 b1 = *(__local const float4*)(slice_b + k * LINE + TILE / 2 + x);
#define ROW(r, v)                               \
  sum[r][0] = FMA((float4)(v), b0, sum[r][0]); \
  sum[r][1] = FMA((float4)(v), b1, sum[r][1]);
      ROW(0, a0.x) ROW(1, a0.y) ROW(2, a0.z) ROW(3, a0.w)
      ROW(4, a1.x) ROW(5, a1.y) ROW(6, a1.z) ROW(7, a1.w)
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  // An array, so that the epilogue's code is emitted once instead of 64 times.
  float values[64];
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    vstore4(sum[r][0], 2 * r, values);
    vstore4(sum[r][1], 2 * r + 1, values);
  }
#pragma unroll 1
  for (int e = 0; e < 64; ++e) {
    const int r = e / 8, c = e % 8;
    const long m = m0 + r / 4 * (TILE / 2) + y + r % 4, n = n0 + c / 4 * (TILE / 2) + x + c % 4;
    if (m >= m_extent || n >= n_extent) continue;
    apply_epilogue(values[e], m, n, d, bias, pre_gelu_out, pre_gelu_in, residual, scale_a, scale_b, scale_in,
           n_extent, alpha, beta, flags);
  }
}
#else
__attribute__((reqd_work_group_size(64, 1, 1)))
__kernel void gemm(__global const void* a, __global const void* b, __global void* d,
                   __global const void* bias, __global void* pre_gelu_out,
                   __global const void* pre_gelu_in, __global const void* residual,
                   __global const float* scale_a, __global const float* scale_b,
                   __global const float* scale_in, long m_extent, long n_extent, long k_extent,
                   float alpha, float beta, uint flags) {
  __local float slice_a[SLICE * TILE], slice_b[SLICE * TILE];
  const int id = get_local_id(0), row = id / 8 * 8, col = id % 8 * 8;
  const long tiles_n = (n_extent + TILE - 1) / TILE;
  const long m0 = (long)get_group_id(0) / tiles_n * TILE;
  const long n0 = (long)get_group_id(0) % tiles_n * TILE;
  float8 sum0 = (float8)(0.0f), sum1 = sum0, sum2 = sum0, sum3 = sum0;
  float8 sum4 = sum0, sum5 = sum0, sum6 = sum0, sum7 = sum0;
  for (long k0 = 0; k0 < k_extent; k0 += SLICE) {
    // slice_a has the layout of a, so rows are copied. The inner loop needs slice_b with rows along
    // n.
    if (m0 + TILE <= m_extent && k0 + SLICE <= k_extent) {
      for (int i = id; i < SLICE * TILE / 8; i += 64) {
        const int line = TRANS_A ? i / (TILE / 8) : i / (SLICE / 8);
        const int at = TRANS_A ? i % (TILE / 8) * 8 : i % (SLICE / 8) * 8;
        const long from = TRANS_A ? (k0 + line) * m_extent + m0 + at : (m0 + line) * k_extent + k0 + at;
        vstore8(load8(a, from, TA), 0, slice_a + line * (TRANS_A ? TILE : SLICE) + at);
      }
    } else {
      for (int e = id; e < SLICE * TILE; e += 64) {
        const int ak = TRANS_A ? e / TILE : e % SLICE, am = TRANS_A ? e % TILE : e / SLICE;
        const long k = k0 + ak, m = m0 + am;
        float v = 0.0f;
        if (k < k_extent && m < m_extent) v = load(a, TRANS_A ? k * m_extent + m : m * k_extent + k, TA);
        slice_a[e] = v;
      }
    }
    if (n0 + TILE <= n_extent && k0 + SLICE <= k_extent) {
      for (int i = id; i < SLICE * TILE / 8; i += 64) {
        if (TRANS_B) {
          const int n = i / (SLICE / 8), k = i % (SLICE / 8) * 8;  // reads a whole cache line
          float values[8];
          vstore8(load8(b, (n0 + n) * k_extent + k0 + k, TB), 0, values);
          for (int j = 0; j < 8; ++j) slice_b[(k + j) * TILE + n] = values[j];
        } else {
          const int k = i / (TILE / 8), n = i % (TILE / 8) * 8;
          vstore8(load8(b, (k0 + k) * n_extent + n0 + n, TB), 0, slice_b + k * TILE + n);
        }
      }
    } else {
      for (int e = id; e < SLICE * TILE; e += 64) {
        const int bk = TRANS_B ? e % SLICE : e / TILE, bn = TRANS_B ? e / SLICE : e % TILE;
        const long k = k0 + bk, n = n0 + bn;
        float v = 0.0f;
        if (k < k_extent && n < n_extent) v = load(b, TRANS_B ? n * k_extent + k : k * n_extent + n, TB);
        slice_b[bk * TILE + bn] = v;
      }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int k = 0; k < SLICE; ++k) {
      const float8 y = vload8(0, slice_b + k * TILE + col);
#define ROW(r) sum##r = FMA((float8)(slice_a[TRANS_A ? k * TILE + row + r : (row + r) * SLICE + k]), y, sum##r);
      ROW(0) ROW(1) ROW(2) ROW(3) ROW(4) ROW(5) ROW(6) ROW(7)
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  float8 sum[8] = {sum0, sum1, sum2, sum3, sum4, sum5, sum6, sum7};
  for (int r = 0; r < 8; ++r) {
    float values[8];
    vstore8(sum[r], 0, values);
    for (int c = 0; c < 8; ++c) {
      const long m = m0 + row + r, n = n0 + col + c;
      if (m >= m_extent || n >= n_extent) continue;
      apply_epilogue(values[c], m, n, d, bias, pre_gelu_out, pre_gelu_in, residual, scale_a, scale_b,
             scale_in, n_extent, alpha, beta, flags);
    }
  }
}
#endif

// Sums op(A) over K. Each work-item sums one row.
__kernel void row_sums(__global const void* a, __global void* sums, __global const float* scale_a,
                       long m_extent, long k_extent, uint flags) {
  const long m = get_global_id(0);
  if (m >= m_extent) return;
  Sum s = {0.0f, 0.0f};
  for (long k = 0; k < k_extent; ++k) {
    add_to(&s, load(a, TRANS_A ? k * m_extent + m : m * k_extent + k, TA));
  }
  float v = total(&s) * (flags & SCALED_A ? *scale_a : 1.0f);
  if (flags & ACCUMULATE_GRAD) v += load(sums, m, TGRAD);
  store(sums, m, TGRAD, v);
}
