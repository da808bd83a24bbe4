// The ops add, fill and strided_copy. TA, TB, TY: dtypes.

// Each work-item processes eight elements, which share a byte of the mask.
__kernel void add(__global const void* a, __global const void* b, __global void* y,
                  __global uchar* mask, long n, float kept, ulong seed, ulong offset,
                  __global const ulong* seed_at, __global const ulong* offset_at, uint at,
                  ulong threshold, int has_mask) {
  const long g = get_global_id(0);
  if (8 * g >= n) return;
  uint keep = 0xffu;
  if (has_mask) {
    const ulong2 random = random_at(seed, offset, seed_at, offset_at, at);
    keep = keep_bits(g, n, random.x, random.y, threshold);
    mask[g] = (uchar)keep;
  }
  const int count = (int)min(8L, n - 8 * g);
  for (int j = 0; j < count; ++j) {
    const float x = load(a, 8 * g + j, TA), branch = load(b, 8 * g + j, TB);
    store(y, 8 * g + j, TY, keep >> j & 1u ? x + branch / kept : x);
  }
}

// The extents are ordered from the outermost dimension; from and to are strides in elements.
typedef struct {
  long extent[8];
  long from[8], to[8];
} Strides;

static void offsets(const Strides* s, int rank, long i, long* from, long* to) {
  *from = *to = 0;
  for (int d = rank - 1; d >= 0; --d) {
    const long at = i % s->extent[d];
    i /= s->extent[d];
    *from += at * s->from[d];
    *to += at * s->to[d];
  }
}

#if defined(BITS) && BITS == 8
typedef uchar Bits;
#elif defined(BITS) && BITS == 16
typedef ushort Bits;
#elif defined(BITS) && BITS == 64
typedef ulong Bits;
#else
typedef uint Bits;
#endif

__kernel void move(__global const Bits* x, __global Bits* y, long n, int rank, Strides strides) {
  const long i = get_global_id(0);
  if (i >= n) return;
  long from, to;
  offsets(&strides, rank, i, &from, &to);
  y[to] = x[from];
}

__kernel void convert(__global const void* x, __global void* y, long n, int rank, Strides strides) {
  const long i = get_global_id(0);
  if (i >= n) return;
  long from, to;
  offsets(&strides, rank, i, &from, &to);
  store(y, to, TY, load(x, from, TA));
}

__kernel void fill(__global Bits* y, long n, int rank, Strides strides, ulong value) {
  const long i = get_global_id(0);
  if (i >= n) return;
  long from, to;
  offsets(&strides, rank, i, &from, &to);
  y[to] = (Bits)value;
}
