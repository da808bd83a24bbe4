// The reference backend: plain loops with double accumulation, on host memory. It registers through
// the plugin ABI like any other backend, but is linked into the library, which calls
// te_fl_reference_query() instead of an exported symbol.
#include <vector>

#include "families.hpp"
#include "te_fl/backend/plugin.hpp"
#include "te_fl/version.hpp"
#include "thread_ranks.hpp"

namespace te_fl::reference {
namespace {

using AppendOps = void (*)(std::vector<te_fl_op_desc>&);
constexpr AppendOps kFamilies[] = {
    append_gemm,      //
    append_quantize,  //
    append_activation, append_scaled_activation,
    append_norm,    //
    append_tensor,  //
    append_moe,        append_chunks,
    append_router,      //
    append_softmax,     //
    append_attention,   //
    append_rope,        //
    append_dropout,     //
    append_optimizer,   //
    append_collective,  //
};

struct Reference : backend::Instance {
  explicit Reference(const te_fl_host_api&) {
    for (AppendOps append : kFamilies) append(ops);
  }
  std::vector<const te_fl_comm_desc*> comms = {&thread_ranks()};
};

constexpr te_fl_plugin_header kHeader =
    backend::plugin_header<Reference>("reference", "te-fl", TE_FL_VERSION);

}  // namespace
}  // namespace te_fl::reference

extern "C" const te_fl_plugin_header* te_fl_reference_query(const te_fl_host_info*) {
  return &te_fl::reference::kHeader;
}
