// Element dtypes and conversions; prepended to every other kernel file. Conversions use integer
// arithmetic, so every device gives the same bits.
#pragma OPENCL FP_CONTRACT OFF

#define F32 1
#define F16 2
#define BF16 3
#define E4M3 4
#define E5M2 5

#ifdef HAS_FMA
#define FMA(a, b, c) fma(a, b, c)
#else
#define FMA(a, b, c) ((a) * (b) + (c))
#endif

static float decode_f16(uint h) {
  const uint sign = (h & 0x8000u) << 16, a = h & 0x7fffu;
  if (a >= 0x7c00u) return as_float(sign | 0x7f800000u | (a & 0x3ffu) << 13 | (a > 0x7c00u ? 0x400000u : 0u));
  if (a < 0x400u) return as_float(sign | as_uint((float)a * 0x1p-24f));
  return as_float(sign | ((a << 13) + 0x38000000u));
}

static float decode_e4m3(uint c) {
  const uint sign = (c & 0x80u) << 24, a = c & 0x7fu;
  if (a == 0x7fu) return as_float(0x7fc00000u);
  if (a < 8u) return as_float(sign | as_uint((float)a * 0x1p-9f));
  return as_float(sign | ((a << 20) + 0x3c000000u));
}

static float decode_e5m2(uint c) {
  const uint sign = (c & 0x80u) << 24, a = c & 0x7fu;
  if (a > 0x7cu) return as_float(0x7fc00000u);
  if (a == 0x7cu) return as_float(sign | 0x7f800000u);
  if (a < 4u) return as_float(sign | as_uint((float)a * 0x1p-16f));
  return as_float(sign | ((a << 21) + 0x38000000u));
}

// Rounds |x| to `m` mantissa bits with this exponent bias, to nearest even. On overflow, the
// exponent continues beyond the format's largest. x must not be NaN.
static uint round_to(uint magnitude, int m, int bias) {
  const int exponent = (int)(magnitude >> 23) - 127;
  int drop = 23 - m;
  if (exponent >= 1 - bias) {
    const uint even = (magnitude >> drop) & 1u;
    return ((magnitude + (1u << (drop - 1)) - 1u + even) >> drop) - ((uint)(127 - bias) << m);
  }
  drop += 1 - bias - exponent;
  if (drop > 24) return 0u;
  const uint significand = (magnitude & 0x7fffffu) | (magnitude >> 23 != 0u ? 0x800000u : 0u);
  return (significand + (1u << (drop - 1)) - 1u + ((significand >> drop) & 1u)) >> drop;
}

// Converts x to the FP8 type `type`, rounded to nearest even. Overflow saturates; every NaN becomes
// 0x7f.
static uchar encode_fp8(float x, int type) {
  const uint bits = as_uint(x), a = bits & 0x7fffffffu;
  if (a > 0x7f800000u) return 0x7f;
  const uint code = type == E4M3 ? min(round_to(a, 3, 7), 0x7eu) : min(round_to(a, 2, 15), 0x7bu);
  return (uchar)((bits >> 24 & 0x80u) | code);
}

static ushort encode_f16(float x) {
  const uint bits = as_uint(x), a = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
  if (a > 0x7f800000u) return (ushort)(sign | 0x7e00u | (a >> 13 & 0x3ffu));
  return (ushort)(sign | min(round_to(a, 10, 15), 0x7c00u));
}

static ushort encode_bf16(float x) {
  const uint bits = as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (ushort)(bits >> 16 | 0x40u);
  return (ushort)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// Loads element i as float. `type` is a compile-time constant in all calls, so the compiler keeps
// only one case.
static float load(__global const void* data, long i, int type) {
  switch (type) {
    case F16:
      return decode_f16(((__global const ushort*)data)[i]);
    case BF16:
      return as_float((uint)((__global const ushort*)data)[i] << 16);
    case E4M3:
      return decode_e4m3(((__global const uchar*)data)[i]);
    case E5M2:
      return decode_e5m2(((__global const uchar*)data)[i]);
    default:
      return ((__global const float*)data)[i];
  }
}

static void store(__global void* data, long i, int type, float x) {
  switch (type) {
    case F16:
      ((__global ushort*)data)[i] = encode_f16(x);
      return;
    case BF16:
      ((__global ushort*)data)[i] = encode_bf16(x);
      return;
    case E4M3:
    case E5M2:
      ((__global uchar*)data)[i] = encode_fp8(x, type);
      return;
    default:
      ((__global float*)data)[i] = x;
  }
}

// Sum and maximum over the work-items of a group. All GROUP work-items must call these functions,
// and all receive the result.
#ifdef GROUP
static float group_sum(__local float* part, float x) {
  const int id = get_local_id(0);
  barrier(CLK_LOCAL_MEM_FENCE);
  part[id] = x;
  for (int half_size = GROUP / 2; half_size > 0; half_size /= 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (id < half_size) part[id] += part[id + half_size];
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  return part[0];
}

static float max_or_nan(float a, float b) { return b > a || isnan(b) ? b : a; }

static float group_max(__local float* part, float x) {  // NaN if any x is NaN
  const int id = get_local_id(0);
  barrier(CLK_LOCAL_MEM_FENCE);
  part[id] = x;
  for (int half_size = GROUP / 2; half_size > 0; half_size /= 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (id < half_size) part[id] = max_or_nan(part[id], part[id + half_size]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  return part[0];
}
#endif

// The state of a compensated (Neumaier) summation.
typedef struct {
  float sum, lost;
} Sum;
static void add_to(Sum* s, float x) {
  const float t = s->sum + x;
  if (isfinite(t)) s->lost += fabs(s->sum) >= fabs(x) ? (s->sum - t) + x : (x - t) + s->sum;
  s->sum = t;
}
static float total(const Sum* s) { return isfinite(s->sum) ? s->sum + s->lost : s->sum; }

// Philox 4x32-10 with the counter and key of te_fl/numeric/philox.hpp.
static uint4 philox(ulong seed, ulong counter) {
  uint4 c = (uint4)((uint)counter, (uint)(counter >> 32), 0u, 0u);
  uint k0 = (uint)seed, k1 = (uint)(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint high0 = mul_hi(0xD2511F53u, c.x), low0 = 0xD2511F53u * c.x;
    const uint high1 = mul_hi(0xCD9E8D57u, c.z), low1 = 0xCD9E8D57u * c.z;
    c = (uint4)(high1 ^ c.y ^ k0, low1, high0 ^ c.w ^ k1, low0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// Returns the RNG seed and offset of a call. Bit 0 of `at`: *seed_at replaces `seed`. Bit 1:
// *offset_at is added to `offset`. random.hpp sets these arguments.
static ulong2 random_at(ulong seed, ulong offset, __global const ulong* seed_at,
                        __global const ulong* offset_at, uint at) {
  if (at & 1u) seed = *seed_at;
  if (at & 2u) offset += *offset_at;
  return (ulong2)(seed, offset);
}

// Returns dropout's decisions for elements 8 g to 8 g + 7: bit i is set if element 8 g + i is kept.
// Bits of elements from n on are 0. An element is kept if its random word is at least the
// threshold.
static uint keep_bits(long g, long n, ulong seed, ulong offset, ulong threshold) {
  uint bits = 0u;
  for (int half_group = 0; half_group < 2; ++half_group) {
    const uint4 w = philox(seed, offset + (ulong)(2 * g + half_group));
    const uint b = (w.x >= threshold) | (w.y >= threshold) << 1 | (w.z >= threshold) << 2 |
                   (w.w >= threshold) << 3;
    bits |= b << 4 * half_group;
  }
  const long left = n - 8 * g;
  return left >= 8 ? bits : bits & ((1u << left) - 1u);
}
