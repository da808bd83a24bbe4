// TX: the dtype. Each work-item processes eight elements, which share a byte of the mask.
__kernel void dropout_forward(__global const void* x, __global void* y, __global uchar* mask,
                              long n, float kept, ulong seed, ulong offset,
                              __global const ulong* seed_at, __global const ulong* offset_at,
                              uint at, ulong threshold) {
  const long g = get_global_id(0);
  if (8 * g >= n) return;
  const ulong2 random = random_at(seed, offset, seed_at, offset_at, at);
  const uint keep = keep_bits(g, n, random.x, random.y, threshold);
  const int count = (int)min(8L, n - 8 * g);
  for (int j = 0; j < count; ++j) {
    const float v = load(x, 8 * g + j, TX);
    store(y, 8 * g + j, TX, keep >> j & 1u ? v / kept : 0.0f);
  }
  mask[g] = (uchar)keep;
}

__kernel void dropout_backward(__global const void* dy, __global const uchar* mask,
                               __global void* dx, long n, float kept) {
  const long g = get_global_id(0);
  if (8 * g >= n) return;
  const uint keep = mask[g];
  const int count = (int)min(8L, n - 8 * g);
  for (int j = 0; j < count; ++j) {
    const float v = load(dy, 8 * g + j, TX);
    store(dx, 8 * g + j, TX, keep >> j & 1u ? v / kept : 0.0f);
  }
}
