/*
 * The null backend: a complete te-fl plugin in C99 with one op, relu on host memory. Copy this
 * folder to start a backend: rename it, replace relu by your first kernel, add descriptors to
 * k_ops. The rules (R1...) are in te_fl/plugin.h.
 */
#include <stdlib.h>

#include "te_fl/ops/activation.h"
#include "te_fl/plugin.h"

/* All state lives in the instance (R8). */
typedef struct null_instance {
  const te_fl_host_api* host;
} null_instance;

static void report(const te_fl_error_sink* sink, const char* text) {
  if (sink != NULL && sink->write != NULL) sink->write(sink->host, text);
}

static int is_compact(const te_fl_dltensor* t) {
  int64_t expected = 1;
  if (t->strides == NULL) return 1;
  for (int32_t i = t->ndim - 1; i >= 0; --i) {
    if (t->shape[i] == 0) return 1;
    if (t->shape[i] != 1 && t->strides[i] != expected) return 0;
    expected *= t->shape[i];
  }
  return 1;
}

/* Reads metadata only (R10). Dtypes, device and scaling modes are static constraints of the
   descriptor; what is left to refuse here is the memory layout. */
static te_fl_status relu_supports(void* self, const te_fl_context* ctx, const void* raw) {
  const te_fl_relu_args* args = (const te_fl_relu_args*)raw;
  (void)self;
  if (is_compact(&args->input->dl) && is_compact(&args->output->dl)) return TE_FL_OK;
  report(ctx->errors, "relu: input and output must be compact row-major");
  return TE_FL_UNSUPPORTED;
}

static te_fl_status relu_run(void* self, const te_fl_context* ctx, const void* raw) {
  const te_fl_relu_args* args = (const te_fl_relu_args*)raw;
  const te_fl_dltensor* in = &args->input->dl;
  const te_fl_dltensor* out = &args->output->dl;
  int64_t n = 1;
  (void)self;
  (void)ctx;
  for (int32_t i = 0; i < in->ndim; ++i) n *= in->shape[i];
  if (n == 0) return TE_FL_OK; /* empty tensors may have no data */
  const float* x = (const float*)((const char*)in->data + in->byte_offset);
  float* y = (float*)((char*)out->data + out->byte_offset);
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] > 0.0f ? x[i] : (x[i] != x[i] ? x[i] : 0.0f);
  return TE_FL_OK;
}

static const te_fl_op_desc k_relu = {
    .struct_size = sizeof(te_fl_op_desc),
    .op_name = "relu",
    .impl_id = "vendor.null", /* R16 */
    .kind = TE_FL_KIND_VENDOR,
    .flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_DETERMINISTIC | TE_FL_OP_IN_PLACE_OK,
    .dtypes = TE_FL_BIT(TE_FL_F32),
    .scalings = TE_FL_BIT(TE_FL_SCALING_NONE),
    .device_types = (uint64_t)1 << TE_FL_DEVICE_CPU,
    .run = relu_run,
    .supports = relu_supports,
    /* .describe: where run() chooses among several kernels, which one a call takes (R31). */
};

static const te_fl_op_desc* const k_ops[] = {&k_relu};

static te_fl_status create(const te_fl_host_api* host, void** instance,
                           const te_fl_error_sink* errors) {
  null_instance* self = (null_instance*)malloc(sizeof *self);
  if (self == NULL) {
    report(errors, "out of host memory");
    return TE_FL_OUT_OF_MEMORY;
  }
  self->host = host;
  *instance = self;
  host->log(host->host, TE_FL_LOG_DEBUG, "null backend created");
  return TE_FL_OK;
}

static te_fl_status ops(void* instance, uint32_t* count, const te_fl_op_desc* const** list,
                        const te_fl_error_sink* errors) {
  (void)instance;
  (void)errors;
  *count = sizeof k_ops / sizeof k_ops[0];
  *list = k_ops;
  return TE_FL_OK;
}

/* Nothing is ever enqueued: run() is done when it returns (R15). */
static te_fl_status quiesce(void* instance, const te_fl_error_sink* errors) {
  (void)instance;
  (void)errors;
  return TE_FL_OK;
}

static void destroy(void* instance) { free(instance); }

static const te_fl_plugin_api k_api = {
    .struct_size = sizeof(te_fl_plugin_api),
    .create = create,
    .devices = NULL, /* host plugins enumerate no device (R18) */
    .ops = ops,
    .quiesce = quiesce,
    .destroy = destroy,
};

static const te_fl_plugin_header k_header = {
    .magic = TE_FL_PLUGIN_MAGIC,
    .struct_size = sizeof(te_fl_plugin_header),
    .abi_major = TE_FL_ABI_MAJOR,
    .abi_minor = TE_FL_ABI_MINOR,
    .min_host_minor = 0, /* the oldest host minor that it can do with (R2) */
    .name = "null",
    .vendor = "null",
    .version = "0.1.0",
    .api = &k_api,
};

/* The one exported symbol (R1): pure, no side effects. */
TE_FL_PLUGIN_EXPORT const te_fl_plugin_header* te_fl_plugin_query(const te_fl_host_info* host) {
  (void)host;
  return &k_header;
}
