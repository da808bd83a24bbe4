// TX: the dtype. Heads are stored in groups: element e of head h of a token is at offset + token *
// token_stride + h / per_group * group_stride + h % per_group * dim + e. A work-item processes a
// pair, or one element that is not rotated.
__kernel void rope(__global const void* x, __global void* y, __global const float* freqs,
                   long tokens, long heads, long dim, long columns, long x_offset,
                   long x_token_stride, long x_group_stride, long y_offset, long y_token_stride,
                   long y_group_stride, long per_group, long extent0, long extent1, int sbhd,
                   int interleaved, int backward, long cp_size, long cp_rank) {
  const long half_columns = columns / 2, items = dim - half_columns;
  const long i = get_global_id(0);
  if (i >= tokens * heads * items) return;
  const long e = i % items, head = i / items % heads, token = i / items / heads;
  const long at = head % per_group * dim;
  const long from = x_offset + token * x_token_stride + head / per_group * x_group_stride + at;
  const long to = y_offset + token * y_token_stride + head / per_group * y_group_stride + at;
  if (e >= half_columns) {
    store(y, to + e + half_columns, TX, load(x, from + e + half_columns, TX));
    return;
  }
  const long length = sbhd ? extent0 : extent1;
  long position = sbhd ? token / extent1 : token % extent1;
  if (cp_size > 1) {
    const long chunk = length / 2;
    position = position < chunk ? cp_rank * chunk + position
                                : (2 * cp_size - 1 - cp_rank) * chunk + position - chunk;
  }
  const long a = interleaved ? 2 * e : e, b = interleaved ? 2 * e + 1 : e + half_columns;
  const float fa = freqs[position * columns + a], fb = freqs[position * columns + b];
  const float xa = load(x, from + a, TX), xb = load(x, from + b, TX);
  const float sign_a = backward ? sin(fb) : -sin(fa), sign_b = backward ? -sin(fa) : sin(fb);
  store(y, to + a, TX, xa * cos(fa) + xb * sign_a);
  store(y, to + b, TX, xb * cos(fb) + xa * sign_b);
}
