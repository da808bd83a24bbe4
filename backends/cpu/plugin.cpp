// The CPU backend: SIMD kernels on one thread pool, host memory. It registers through the plugin
// ABI like any other backend; te_fl_cpu_query takes the place of the exported symbol.
#include <charconv>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "families.hpp"
#include "te_fl/backend.hpp"
#include "te_fl/version.hpp"
#include "thread_pool.hpp"

namespace te_fl::cpu {
namespace {

using AppendOps = void (*)(std::vector<te_fl_op_desc>&);
constexpr AppendOps kFamilies[] = {
    append_gemm,        //
    append_quantize,    //
    append_activation,  //
    append_norm,        //
    append_tensor,      //
    append_optimizer,   //
    append_attention,   //
    append_softmax,     //
    append_rope,        //
    append_dropout,     //
};

struct Instance {
  std::vector<te_fl_op_desc> ops;
  std::vector<const te_fl_op_desc*> list;
};

// TE_FL_NUM_THREADS; absent or 0 chooses the CPUs available to the process.
void configure_pool(const te_fl_host_api& host) {
  const char* text =
      host.setting != nullptr ? host.setting(host.host, "TE_FL_NUM_THREADS") : nullptr;
  if (text == nullptr || *text == '\0') return;
  int threads = 0;
  const char* end = text + std::strlen(text);
  const auto [rest, error] = std::from_chars(text, end, threads);
  if (error != std::errc() || rest != end || threads < 0 || threads > ThreadPool::kMaxThreads) {
    backend::invalid(std::string("TE_FL_NUM_THREADS is \"") + text +
                     "\"; it must be a number from 0 (the CPUs available) to " +
                     std::to_string(ThreadPool::kMaxThreads));
  }
  ThreadPool::instance().configure(threads);
}

te_fl_status create(const te_fl_host_api* host, void** out, const te_fl_error_sink* errors) {
  return backend::guard(errors, [&] {
    configure_pool(*host);
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
    .name = "cpu",
    .vendor = "te-fl",
    .version = TE_FL_VERSION,
    .build_id = nullptr,
    .api = &kApi,
    .reserved = {},
};

}  // namespace
}  // namespace te_fl::cpu

extern "C" const te_fl_plugin_header* te_fl_cpu_query(const te_fl_host_info*) {
  return &te_fl::cpu::kHeader;
}
