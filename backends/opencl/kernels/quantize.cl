// Per-tensor FP8. TX: dtype of the input. TY: dtype of the output. `state`: two words, the bits of
// the amax and the scale.

__kernel void amax(__global const void* x, long n, __global uint* state) {
  const int id = get_local_id(0);
  __local uint part[GROUP];
  uint found = 0u;
  for (long i = get_global_id(0); i < n; i += get_global_size(0)) {
    const uint a = as_uint(load(x, i, TX)) & 0x7fffffffu;
    if (a <= 0x7f800000u) found = max(found, a);  // NaN is ignored
  }
  part[id] = found;
  for (int half_size = GROUP / 2; half_size > 0; half_size /= 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (id < half_size) part[id] = max(part[id], part[id + half_size]);
  }
  if (id == 0) atomic_max(state, part[0]);
}

#define CURRENT 1
#define POW2 2
#define HAS_AMAX 4
#define HAS_SCALE 8
#define HAS_SCALE_INV 16
#define HAS_COLUMN_SCALE_INV 32
#define HAS_NOOP 64

// Run by one work-item. Computes the scale from the amax, and writes amax, scale and scale_inv.
__kernel void settle(__global uint* state, __global float* amax, __global float* scale,
                     __global float* scale_inv, __global float* column_scale_inv,
                     __global const float* noop, uint flags, float epsilon, float largest) {
  if ((flags & HAS_NOOP) && *noop != 0.0f) return;
  const float found = as_float(state[0]);
  float s;
  if (flags & CURRENT) {
    const float bound = found < epsilon ? epsilon : found;
    s = 1.0f;
    if (bound != 0.0f && isfinite(bound)) {
      s = largest / bound;
      if (isinf(s)) s = FLT_MAX;
      if (flags & POW2) s = as_float(as_uint(s) & 0xff800000u);
    }
    if (flags & HAS_AMAX) *amax = found;
    if (flags & HAS_SCALE) *scale = s;
  } else {
    s = *scale;
    if ((flags & HAS_AMAX) && found > *amax) *amax = found;
  }
  if (flags & HAS_SCALE_INV) *scale_inv = 1.0f / s;
  if (flags & HAS_COLUMN_SCALE_INV) *column_scale_inv = 1.0f / s;
  state[1] = as_uint(s);
}

#define HAS_ROWS 1
#define HAS_COLUMNS 2

__kernel void cast(__global const void* x, __global uchar* rows, __global uchar* columns, long m,
                   long k, __global const uint* state, __global const float* noop, uint flags) {
  const long i = get_global_id(0);
  if (i >= m * k || ((flags & HAS_NOOP) && *noop != 0.0f)) return;
  const uchar code = encode_fp8(load(x, i, TX) * as_float(state[1]), TY);
  if (flags & HAS_ROWS) rows[i] = code;
  if (flags & HAS_COLUMNS) columns[i % k * m + i / k] = code;
}

// Dequantises a matrix [m, k]. TX: E4M3 or E5M2. `transposed`: `codes` is the transposed matrix [k,
// m].
__kernel void dequantize(__global const void* codes, __global void* y, long m, long k,
                         __global const float* scale_inv, int transposed) {
  const long i = get_global_id(0);
  if (i >= m * k) return;
  store(y, i, TY, load(codes, transposed ? i % k * m + i / k : i, TX) * *scale_inv);
}

__kernel void column_sums(__global const void* x, __global void* sums, long m, long k) {
  const long c = get_global_id(0);
  if (c >= k) return;
  Sum s = {0.0f, 0.0f};
  for (long r = 0; r < m; ++r) add_to(&s, load(x, r * k + c, TX));
  store(sums, c, TY, total(&s));
}

__kernel void store_amax(__global const uint* state, __global float* amax) {
  *amax = as_float(state[0]);
}

__kernel void transpose_codes(__global const uchar* x, __global uchar* y, long m, long k) {
  const long i = get_global_id(0);
  if (i < m * k) y[i % k * m + i / k] = x[i];
}
