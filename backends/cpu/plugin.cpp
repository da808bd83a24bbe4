// The CPU backend: SIMD kernels on one thread pool, for host memory. It registers through the
// plugin ABI like any other backend, but is linked into the library, which calls te_fl_cpu_query()
// instead of an exported symbol.
#include <charconv>
#include <cstring>
#include <string>
#include <vector>

#include "families.hpp"
#include "te_fl/backend/plugin.hpp"
#include "te_fl/version.hpp"
#include "thread_pool.hpp"

namespace te_fl::cpu {
namespace {

using AppendOps = void (*)(std::vector<te_fl_op_desc>&);
constexpr AppendOps kFamilies[] = {
    append_gemm,      //
    append_quantize,  //
    append_activation, append_scaled_activation,
    append_norm,    //
    append_tensor,  //
    append_moe,        append_chunks,
    append_router,     //
    append_optimizer,  //
    append_attention,  //
    append_softmax,    //
    append_rope,       //
    append_dropout,    //
};

// Applies TE_FL_NUM_THREADS. If it is absent or 0, the pool uses the CPUs available to the process.
void configure_pool(const te_fl_host_api& host) {
  const char* text = backend::setting(host, "TE_FL_NUM_THREADS");
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

struct Cpu : backend::Instance {
  explicit Cpu(const te_fl_host_api& host) {
    configure_pool(host);
    for (AppendOps append : kFamilies) append(ops);
  }
};

constexpr te_fl_plugin_header kHeader = backend::plugin_header<Cpu>("cpu", "te-fl", TE_FL_VERSION);

}  // namespace
}  // namespace te_fl::cpu

extern "C" const te_fl_plugin_header* te_fl_cpu_query(const te_fl_host_info*) {
  return &te_fl::cpu::kHeader;
}
