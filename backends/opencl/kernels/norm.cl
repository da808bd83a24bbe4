// One group processes one row. TX, TG, TZ, TB, TR, TS: dtypes of x, gamma, the result (dx in
// gradients), beta (dgamma), residual (add) and sum (dz). CENTERED: layer normalisation; otherwise
// RMS.
#define ZERO_CENTERED 1
#define HAS_BETA 2
#define HAS_RESIDUAL 4
#define HAS_ADD 8

static float weight(__global const void* gamma, long c, uint flags) {
  return (flags & ZERO_CENTERED ? 1.0f : 0.0f) + load(gamma, c, TG);
}

#ifdef FORWARD
// Returns the element that is normalised: x[i] or, with a residual, sum[i], which holds the rounded
// x + residual.
static float input_at(__global const void* x, __global const void* sum, long i, uint flags) {
  return flags & HAS_RESIDUAL ? load(sum, i, TS) : load(x, i, TX);
}

__kernel void norm_forward(__global const void* x, __global const void* residual,
                           __global void* sum, __global const void* gamma,
                           __global const void* beta, __global void* z, __global float* mu,
                           __global float* rsigma, long cols, float epsilon, uint flags) {
  __local float part[GROUP];
  const int id = get_local_id(0);
  const long row = get_group_id(0), begin = row * cols;
  if (flags & HAS_RESIDUAL) {  // a column is written and read by the same work-item
    for (long c = id; c < cols; c += GROUP) {
      store(sum, begin + c, TS, load(x, begin + c, TX) + load(residual, begin + c, TR));
    }
  }
  float mean = 0.0f;
  if (CENTERED) {
    float s = 0.0f;
    for (long c = id; c < cols; c += GROUP) s += input_at(x, sum, begin + c, flags);
    mean = group_sum(part, s) / (float)cols;
  }
  float squares = 0.0f;
  for (long c = id; c < cols; c += GROUP) {
    const float d = input_at(x, sum, begin + c, flags) - mean;
    squares += d * d;
  }
  const float r = 1.0f / sqrt(group_sum(part, squares) / (float)cols + epsilon);
  for (long c = id; c < cols; c += GROUP) {
    float v = (input_at(x, sum, begin + c, flags) - mean) * r * weight(gamma, c, flags);
    if (flags & HAS_BETA) v += load(beta, c, TB);
    store(z, begin + c, TZ, v);
  }
  if (id == 0) {
    if (CENTERED) mu[row] = mean;
    rsigma[row] = r;
  }
}
#else
__kernel void norm_backward(__global const void* dz, __global const void* x,
                            __global const void* add, __global const float* mu,
                            __global const float* rsigma, __global const void* gamma,
                            __global void* dx, long cols, uint flags) {
  __local float part[GROUP];
  const int id = get_local_id(0);
  const long row = get_group_id(0), begin = row * cols;
  const float mean = CENTERED ? mu[row] : 0.0f, r = rsigma[row];
  float sum_d = 0.0f, sum_dn = 0.0f;
  for (long c = id; c < cols; c += GROUP) {
    const float d = load(dz, begin + c, TS) * weight(gamma, c, flags);
    sum_d += d;
    sum_dn += d * ((load(x, begin + c, TX) - mean) * r);
  }
  const float mean_d = CENTERED ? group_sum(part, sum_d) / (float)cols : 0.0f;
  const float mean_dn = group_sum(part, sum_dn) / (float)cols;
  for (long c = id; c < cols; c += GROUP) {
    const float d = load(dz, begin + c, TS) * weight(gamma, c, flags);
    const float n = (load(x, begin + c, TX) - mean) * r;
    float v = r * (d - mean_d - n * mean_dn);
    if (flags & HAS_ADD) v += load(add, begin + c, TR);
    store(dx, begin + c, TZ, v);
  }
}

// Computes dgamma and dbeta, one column per work-item. Must run before norm_backward, whose output
// may share dz's memory.
__kernel void norm_weight_gradients(__global const void* dz, __global const void* x,
                                    __global const float* mu, __global const float* rsigma,
                                    __global void* dgamma, __global void* dbeta, long rows,
                                    long cols, uint flags) {
  const long c = get_global_id(0);
  if (c >= cols) return;
  Sum gamma_sum = {0.0f, 0.0f}, beta_sum = {0.0f, 0.0f};
  for (long row = 0; row < rows; ++row) {
    const float g = load(dz, row * cols + c, TS);
    const float mean = CENTERED ? mu[row] : 0.0f;
    add_to(&gamma_sum, g * ((load(x, row * cols + c, TX) - mean) * rsigma[row]));
    add_to(&beta_sum, g);
  }
  store(dgamma, c, TB, total(&gamma_sum));
  if (flags & HAS_BETA) store(dbeta, c, TBETA, total(&beta_sum));
}
#endif
