// ACT: the activation. TX, TG, TY: dtypes of the input, the gradient and the output.
#define GELU 0
#define QGELU 1
#define RELU 2
#define SRELU 3
#define SILU 4
#define SIGMOID 5
#define CLAMPED 6

static float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

static float swish(float x, float alpha) { return x * sigmoid(alpha * x); }
static float d_swish(float x, float alpha) {
  const float s = sigmoid(alpha * x);
  return s + alpha * x * s * sigmoid(-alpha * x);
}

#define TWO_C 1.5957691216f  // 2 sqrt(2 / pi)

static float act(float x, float alpha) {
  switch (ACT) {
    case GELU:
      return x * sigmoid(TWO_C * (x + 0.044715f * x * x * x));
    case QGELU:
      return swish(x, 1.702f);
    case RELU:
      return x <= 0.0f ? 0.0f : x;
    case SRELU:
      return x <= 0.0f ? 0.0f : x * x;
    case SILU:
      return swish(x, 1.0f);
    case SIGMOID:
      return sigmoid(x);
    default:
      return swish(x, alpha);
  }
}

static float d_act(float x, float alpha) {
  switch (ACT) {
    case GELU: {
      if (fabs(x) > 64.0f) return x > 0.0f ? 1.0f : 0.0f;  // avoids overflow below
      const float u = TWO_C * (x + 0.044715f * x * x * x), s = sigmoid(u);
      return s + x * s * sigmoid(-u) * TWO_C * (1.0f + 0.134145f * x * x);
    }
    case QGELU:
      return d_swish(x, 1.702f);
    case RELU:
      return x > 0.0f ? 1.0f : 0.0f;
    case SRELU:
      return x <= 0.0f ? 0.0f : 2.0f * x;
    case SILU:
      return d_swish(x, 1.0f);
    case SIGMOID:
      return sigmoid(x) * sigmoid(-x);
    default:
      return d_swish(x, alpha);
  }
}

__kernel void act_forward(__global const void* x, __global void* y, long n) {
  const long i = get_global_id(0);
  if (i < n) store(y, i, TY, act(load(x, i, TX), 1.0f));
}

__kernel void act_backward(__global const void* grad, __global const void* x, __global void* dx,
                           long n) {
  const long i = get_global_id(0);
  if (i < n) store(dx, i, TY, load(grad, i, TG) * d_act(load(x, i, TX), 1.0f));
}

// Computes dbias, the sum of dx over the rows. Recomputes dx, and must run before dx is written,
// because dx may share an input's memory.
__kernel void act_bias_gradient(__global const void* grad, __global const void* x,
                                __global void* dbias, long rows, long cols) {
  const long c = get_global_id(0);
  if (c >= cols) return;
  Sum s = {0.0f, 0.0f};
  for (long r = 0; r < rows; ++r) {
    const long i = r * cols + c;
    add_to(&s, load(grad, i, TG) * d_act(load(x, i, TX), 1.0f));
  }
  store(dbias, c, TB, total(&s));
}

// Minimum with `limit`, and clamp to [-limit, limit]. Both functions return NaN for NaN.
static float clamp_high(float x, float limit) { return x > limit ? limit : x; }
static float clamp_both(float x, float limit) { return clamp_high(x < -limit ? -limit : x, limit); }

__kernel void gated_forward(__global const void* x, __global void* y, long n, long half_cols,
                            float limit, float alpha, float offset) {
  const long i = get_global_id(0);
  if (i >= n) return;
  const long at = i / half_cols * 2 * half_cols + i % half_cols;
  float a = load(x, at, TX), b = load(x, at + half_cols, TX);
  if (ACT == CLAMPED) {
    a = clamp_high(a, limit);
    b = clamp_both(b, limit) + offset;
  }
  store(y, i, TY, act(a, alpha) * b);
}

__kernel void gated_backward(__global const void* grad, __global const void* x, __global void* dx,
                             long n, long half_cols, float limit, float alpha,
                             float offset) {
  const long i = get_global_id(0);
  if (i >= n) return;
  const long at = i / half_cols * 2 * half_cols + i % half_cols;
  const float dy = load(grad, i, TG), a = load(x, at, TX), b = load(x, at + half_cols, TX);
  float da, db;
  if (ACT == CLAMPED) {
    const float top = clamp_high(a, limit);
    da = a > limit ? 0.0f : dy * d_act(a, alpha) * (clamp_both(b, limit) + offset);
    db = fabs(b) > limit ? 0.0f : dy * act(top, alpha);
  } else {
    da = dy * d_act(a, alpha) * b;
    db = dy * act(a, alpha);
  }
  store(dx, at, TY, da);
  store(dx, at + half_cols, TY, db);
}
