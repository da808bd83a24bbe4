// One group processes one row of scores. TX: the dtype. CAUSAL: query q sees the first q + keys -
// queries + 1 keys; otherwise all keys. MASKED: there is a mask; its strides are in elements, and 0
// for a broadcast dimension.
static long visible_keys(long row, long queries, long keys) {
  if (!CAUSAL) return keys;
  return clamp(row % queries + keys - queries + 1, 0L, keys);
}

static bool is_masked(__global const uchar* mask, long at) {
#if MASKED
  return mask[at] != 0;
#else
  return false;
#endif
}

__kernel void softmax_forward(__global const void* x, __global const uchar* mask, __global void* y,
                              long heads, long queries, long keys, float scale, long batch_stride,
                              long head_stride, long query_stride, long key_stride) {
  __local float part[GROUP];
  const int id = get_local_id(0);
  const long row = get_group_id(0), begin = row * keys;
  const long visible = visible_keys(row, queries, keys);
  long mask_at = 0;
  if (MASKED) {
    const long head = row / queries;
    mask_at = head / heads * batch_stride + head % heads * head_stride +
              row % queries * query_stride;
  }
  float top = -INFINITY;
  for (long k = id; k < visible; k += GROUP) {
    if (is_masked(mask, mask_at + k * key_stride)) continue;
    top = max_or_nan(top, scale * load(x, begin + k, TX));
  }
  top = group_max(part, top);
  float s = 0.0f;
  if (top != -INFINITY) {
    for (long k = id; k < visible; k += GROUP) {
      if (is_masked(mask, mask_at + k * key_stride)) continue;
      s += exp(scale * load(x, begin + k, TX) - top);
    }
  }
  s = group_sum(part, s);
  for (long k = id; k < keys; k += GROUP) {
    float v = 0.0f;
    const bool seen = k < visible && !is_masked(mask, mask_at + k * key_stride);
    if (seen && top != -INFINITY) v = exp(scale * load(x, begin + k, TX) - top) / s;
    store(y, begin + k, TX, v);
  }
}

__kernel void softmax_backward(__global const void* dy, __global const void* y, __global void* dx,
                               long queries, long keys, float scale) {
  __local float part[GROUP];
  const int id = get_local_id(0);
  const long row = get_group_id(0), begin = row * keys;
  const long visible = visible_keys(row, queries, keys);
  float dot_product = 0.0f;
  for (long k = id; k < visible; k += GROUP) {
    dot_product += load(dy, begin + k, TX) * load(y, begin + k, TX);
  }
  dot_product = group_sum(part, dot_product);
  for (long k = id; k < keys; k += GROUP) {
    float v = 0.0f;
    if (k < visible) v = scale * load(y, begin + k, TX) * (load(dy, begin + k, TX) - dot_product);
    store(dx, begin + k, TX, v);
  }
}
