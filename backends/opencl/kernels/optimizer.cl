// TG, TP: dtypes of the gradient and the parameter.
#define HAS_MASTER 1
#define HAS_NOOP 2
#define ADAMW 4
#define CORRECT 8
#define HAS_STEP 16
#define HAS_LR 32

// Returns 1 - beta^step, computed without cancellation; 1 - beta is exact in FP32.
static float correction(float beta, long step) {
  return -expm1((float)step * log1p(-(1.0f - beta)));
}

__kernel void adam(__global const void* grad, __global void* param, __global float* m,
                   __global float* v, __global float* master, __global const int* noop,
                   __global const float* lr_tensor, __global const long* step_tensor, long n,
                   float lr, float beta1, float beta2, float epsilon, float decay,
                   float correction1, float correction2, uint flags) {
  const long i = get_global_id(0);
  if (i >= n || ((flags & HAS_NOOP) && *noop != 0)) return;
  if (flags & HAS_LR) lr = *lr_tensor;
  if ((flags & CORRECT) && (flags & HAS_STEP)) {
    correction1 = correction(beta1, *step_tensor);
    correction2 = correction(beta2, *step_tensor);
  }
  float p = flags & HAS_MASTER ? master[i] : load(param, i, TP);
  float g = load(grad, i, TG);
  if (!(flags & ADAMW)) g += decay * p;
  const float new_m = beta1 * m[i] + (1.0f - beta1) * g;
  const float new_v = beta2 * v[i] + (1.0f - beta2) * g * g;
  m[i] = new_m;
  v[i] = new_v;
  float update = new_m / correction1 / (sqrt(new_v / correction2) + epsilon);
  if (flags & ADAMW) update += decay * p;
  p -= lr * update;
  if (flags & HAS_MASTER) master[i] = p;
  store(param, i, TP, p);
}

// Delayed scaling. Each work-item updates one tensor's column of the amax history and its scale.
#define MOST_RECENT 1
#define HAS_REDUCED 2
__kernel void update_scales(__global float* history, __global float* scales,
                            __global const float* reduced, long position, long length, long tensors,
                            float largest, uint flags) {
  const long t = get_global_id(0);
  if (t >= tensors) return;
  float last = flags & HAS_REDUCED ? reduced[position + t] : 0.0f;
  if (last == 0.0f) last = history[t];
  float top = 0.0f;
  for (long r = 0; last != 0.0f && r < length; ++r) {
    const float entry = r + 1 < length ? history[(r + 1) * tensors + t] : last;
    if (entry > top) top = entry;
    history[r * tensors + t] = r == 0 ? 0.0f : entry;
  }
  const float amax = flags & MOST_RECENT ? last : top;
  float scale = scales[t];
  if (amax > 0.0f && isfinite(amax)) scale = largest / amax;
  scales[t] = isinf(scale) ? FLT_MAX : scale;
}
