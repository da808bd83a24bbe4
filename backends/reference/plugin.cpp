// The reference backend: plain loops with double accumulation, on host memory. It registers through
// the plugin ABI like any other backend; te_fl_reference_query takes the place of the exported
// symbol.
#include <memory>
#include <vector>

#include "families.hpp"
#include "te_fl/backend.hpp"
#include "te_fl/version.hpp"

namespace te_fl::reference {
namespace {

using AppendOps = void (*)(std::vector<te_fl_op_desc>&);
constexpr AppendOps kFamilies[] = {
    append_gemm,        //
    append_quantize,    //
    append_activation,  //
    append_norm,        //
    append_tensor,      //
    append_softmax,     //
    append_attention,   //
    append_rope,        //
    append_dropout,     //
    append_optimizer,   //
};

struct Instance {
  std::vector<te_fl_op_desc> ops;
  std::vector<const te_fl_op_desc*> list;
};

te_fl_status create(const te_fl_host_api*, void** out, const te_fl_error_sink* errors) {
  return backend::guard(errors, [&] {
    auto instance = std::make_unique<Instance>();
    for (AppendOps append : kFamilies) append(instance->ops);
    for (const te_fl_op_desc& op : instance->ops) instance->list.push_back(&op);
    *out = instance.release();
  });
}

te_fl_status ops(void* self, uint32_t* count, const te_fl_op_desc* const** list,
                 const te_fl_error_sink*) {
  const auto* instance = static_cast<const Instance*>(self);
  *count = static_cast<uint32_t>(instance->list.size());
  *list = instance->list.data();
  return TE_FL_OK;
}

// Every op has finished when its run() returns.
te_fl_status quiesce(void*, const te_fl_error_sink*) { return TE_FL_OK; }

void destroy(void* self) { delete static_cast<Instance*>(self); }

constexpr te_fl_plugin_api kApi = {
    .struct_size = sizeof(te_fl_plugin_api),
    .reserved = 0,
    .create = create,
    .devices = nullptr,
    .ops = ops,
    .quiesce = quiesce,
    .destroy = destroy,
};

constexpr te_fl_plugin_header kHeader = {
    .magic = TE_FL_PLUGIN_MAGIC,
    .struct_size = sizeof(te_fl_plugin_header),
    .abi_major = TE_FL_ABI_MAJOR,
    .abi_minor = TE_FL_ABI_MINOR,
    .min_host_minor = 0,
    .features = 0,
    .name = "reference",
    .vendor = "te-fl",
    .version = TE_FL_VERSION,
    .build_id = nullptr,
    .api = &kApi,
    .reserved = {},
};

}  // namespace
}  // namespace te_fl::reference

extern "C" const te_fl_plugin_header* te_fl_reference_query(const te_fl_host_info*) {
  return &te_fl::reference::kHeader;
}
