// A plugin with two FarDevices and an implementation of one op; all other ops on their tensors run
// in other implementations.
#include "support/far_device.hpp"
#include "te_fl/backend.hpp"
#include "te_fl/backend/plugin.hpp"
#include "te_fl/ops/tensor.h"

namespace {

namespace b = te_fl::backend;
using te_fl::testing::FarDevice;

struct Far : b::DeviceInstance {
  explicit Far(const te_fl_host_api&);
  te_fl_status quiesce(const te_fl_error_sink*) {
    first.queues.drain();
    second.queues.drain();
    return TE_FL_OK;
  }

  FarDevice first{0}, second{1};
};

void add_supports(const te_fl_context&, const te_fl_add_args& args) {
  if (args.p != 0) b::unsupported("add: dropout is not implemented");
  for (const te_fl_tensor* t : {args.a, args.b, args.output}) {
    if (!b::is_contiguous(*t)) b::unsupported("add: takes compact tensors only");
  }
}

te_fl_status add_run(void* self, const te_fl_context* ctx, const void* raw) {
  return b::guard(ctx->errors, [&] {
    const b::Widened<te_fl_add_args> args(raw);
    auto& far = *static_cast<Far*>(self);
    FarDevice& device = ctx->device.index == 0 ? far.first : far.second;
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

Far::Far(const te_fl_host_api&) {
  devices = {&first.desc, &second.desc};
  te_fl_op_desc& add = ops.emplace_back();
  add.op_name = "add";
  add.impl_id = "vendor.far";
  add.kind = TE_FL_KIND_VENDOR;
  add.flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_DETERMINISTIC | TE_FL_OP_IN_PLACE_OK;
  add.dtypes = TE_FL_BIT(TE_FL_F32);
  add.scalings = TE_FL_BIT(TE_FL_SCALING_NONE);
  add.device_types = uint64_t{1} << TE_FL_DEVICE_EXT;
  add.self = this;
  add.run = add_run;
  add.supports = b::supports_thunk<te_fl_add_args, add_supports>;
}

constexpr te_fl_plugin_header kHeader = b::plugin_header<Far>("far", "far", "1.0.0");

}  // namespace

extern "C" TE_FL_PLUGIN_EXPORT const te_fl_plugin_header* te_fl_plugin_query(
    const te_fl_host_info*) {
  return &kHeader;
}
