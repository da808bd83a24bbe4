// Two far devices as a plugin, with one op of their own: what else is called on their tensors has
// to be served elsewhere.
#include <memory>

#include "support/far_device.hpp"
#include "te_fl/backend.hpp"
#include "te_fl/ops/tensor.h"

namespace {

namespace b = te_fl::backend;
using te_fl::testing::FarDevice;

struct Instance {
  FarDevice first{0}, second{1};
  const te_fl_device_desc* devices[2];
  te_fl_op_desc add;
  const te_fl_op_desc* ops[1];
};

te_fl_status add_supports(void*, const te_fl_context* ctx, const void* raw) {
  return b::guard(ctx->errors, [&] {
    const b::Widened<te_fl_add_args> args(raw);
    if ((*args).p != 0) b::unsupported("add: dropout is not implemented");
    for (const te_fl_tensor* t : {(*args).a, (*args).b, (*args).output}) {
      if (!b::is_contiguous(*t)) b::unsupported("add: takes compact tensors only");
    }
  });
}

te_fl_status add_run(void* self, const te_fl_context* ctx, const void* raw) {
  return b::guard(ctx->errors, [&] {
    const b::Widened<te_fl_add_args> args(raw);
    auto& instance = *static_cast<Instance*>(self);
    FarDevice& device = ctx->device.index == 0 ? instance.first : instance.second;
    const int64_t n = b::numel(*(*args).output);
    if (n == 0) return;
    const auto at = [&](const te_fl_tensor& t) {
      return reinterpret_cast<float*>(device.real(b::data<char>(t)));
    };
    device.enqueue(ctx->stream,
                   [n, x = at(*(*args).a), y = at(*(*args).b), out = at(*(*args).output)] {
                     for (int64_t i = 0; i < n; ++i) out[i] = x[i] + y[i];
                   });
  });
}

te_fl_status create(const te_fl_host_api*, void** instance, const te_fl_error_sink* errors) {
  return b::guard(errors, [&] {
    auto made = std::make_unique<Instance>();
    made->devices[0] = &made->first.desc;
    made->devices[1] = &made->second.desc;
    made->add.op_name = "add";
    made->add.impl_id = "vendor.far";
    made->add.kind = TE_FL_KIND_VENDOR;
    made->add.flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_DETERMINISTIC | TE_FL_OP_IN_PLACE_OK;
    made->add.dtypes = TE_FL_BIT(TE_FL_F32);
    made->add.scalings = TE_FL_BIT(TE_FL_SCALING_NONE);
    made->add.device_types = uint64_t{1} << TE_FL_DEVICE_EXT;
    made->add.self = made.get();
    made->add.run = add_run;
    made->add.supports = add_supports;
    made->ops[0] = &made->add;
    *instance = made.release();
  });
}

te_fl_status devices(void* instance, uint32_t* count, const te_fl_device_desc* const** list,
                     const te_fl_error_sink*) {
  *count = 2;
  *list = static_cast<Instance*>(instance)->devices;
  return TE_FL_OK;
}

te_fl_status ops(void* instance, uint32_t* count, const te_fl_op_desc* const** list,
                 const te_fl_error_sink*) {
  *count = 1;
  *list = static_cast<Instance*>(instance)->ops;
  return TE_FL_OK;
}

void destroy(void* instance) { delete static_cast<Instance*>(instance); }

constexpr te_fl_plugin_api kApi = {
    sizeof(te_fl_plugin_api), 0, create, devices, ops, nullptr, destroy};
constexpr te_fl_plugin_header kHeader = {TE_FL_PLUGIN_MAGIC,
                                         sizeof(te_fl_plugin_header),
                                         TE_FL_ABI_MAJOR,
                                         TE_FL_ABI_MINOR,
                                         0,
                                         0,
                                         "far",
                                         "far",
                                         "1.0.0",
                                         nullptr,
                                         &kApi,
                                         {}};

}  // namespace

extern "C" TE_FL_PLUGIN_EXPORT const te_fl_plugin_header* te_fl_plugin_query(
    const te_fl_host_info*) {
  return &kHeader;
}
