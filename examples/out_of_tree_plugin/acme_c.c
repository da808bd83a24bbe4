/* A vendor plugin in C99: silu on host memory, FP32. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "te_fl/ops/activation.h"
#include "te_fl/plugin.h"

static te_fl_status silu_supports(void* self, const te_fl_context* ctx, const void* raw) {
  const te_fl_silu_args* args = (const te_fl_silu_args*)raw;
  (void)self;
  if (args->input->dl.strides == NULL && args->output->dl.strides == NULL) return TE_FL_OK;
  /* te-fl's own tensors always have strides: accept those of compact tensors. */
  const te_fl_dltensor* both[2] = {&args->input->dl, &args->output->dl};
  for (int k = 0; k < 2; ++k) {
    int64_t expected = 1;
    for (int32_t i = both[k]->ndim - 1; both[k]->strides != NULL && i >= 0; --i) {
      if (both[k]->shape[i] != 1 && both[k]->strides[i] != expected) {
        if (ctx->errors != NULL)
          ctx->errors->write(ctx->errors->host, "silu takes compact tensors only");
        return TE_FL_UNSUPPORTED;
      }
      expected *= both[k]->shape[i];
    }
  }
  return TE_FL_OK;
}

static te_fl_status silu_run(void* self, const te_fl_context* ctx, const void* raw) {
  const te_fl_silu_args* args = (const te_fl_silu_args*)raw;
  int64_t n = 1;
  (void)self;
  (void)ctx;
  for (int32_t i = 0; i < args->input->dl.ndim; ++i) n *= args->input->dl.shape[i];
  if (n == 0) return TE_FL_OK;
  const float* x = (const float*)((const char*)args->input->dl.data + args->input->dl.byte_offset);
  float* y = (float*)((char*)args->output->dl.data + args->output->dl.byte_offset);
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] / (1.0f + expf(-x[i]));
  return TE_FL_OK;
}

static const te_fl_op_desc k_silu = {
    .struct_size = sizeof(te_fl_op_desc),
    .op_name = "silu",
    .impl_id = "vendor.acme_c",
    .kind = TE_FL_KIND_VENDOR,
    .flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_DETERMINISTIC | TE_FL_OP_IN_PLACE_OK,
    .dtypes = TE_FL_BIT(TE_FL_F32),
    .scalings = TE_FL_BIT(TE_FL_SCALING_NONE),
    .device_types = (uint64_t)1 << TE_FL_DEVICE_CPU,
    .run = silu_run,
    .supports = silu_supports,
};
static const te_fl_op_desc* const k_ops[] = {&k_silu};

static int the_instance; /* the plugin has no state; the address only must not be NULL */

static te_fl_status create(const te_fl_host_api* host, void** instance,
                           const te_fl_error_sink* errors) {
  (void)errors;
  host->log(host->host, TE_FL_LOG_INFO, "hello from C");
  *instance = &the_instance;
  return TE_FL_OK;
}
static te_fl_status ops(void* instance, uint32_t* count, const te_fl_op_desc* const** list,
                        const te_fl_error_sink* errors) {
  (void)instance;
  (void)errors;
  *count = 1;
  *list = k_ops;
  return TE_FL_OK;
}
static void destroy(void* instance) { (void)instance; }

static const te_fl_plugin_api k_api = {
    .struct_size = sizeof(te_fl_plugin_api), .create = create, .ops = ops, .destroy = destroy};
static const te_fl_plugin_header k_header = {
    .magic = TE_FL_PLUGIN_MAGIC,
    .struct_size = sizeof(te_fl_plugin_header),
    .abi_major = TE_FL_ABI_MAJOR,
    .abi_minor = TE_FL_ABI_MINOR,
    .min_host_minor = 0, /* oldest host minor version that suffices (R2) */
    .name = "acme_c",
    .vendor = "acme",
    .version = "1.0.0",
    .api = &k_api,
};

TE_FL_PLUGIN_EXPORT const te_fl_plugin_header* te_fl_plugin_query(const te_fl_host_info* host) {
  (void)host;
  return &k_header;
}
