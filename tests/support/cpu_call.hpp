// Calls the CPU backend's descriptors directly, in the order of the host: supports(), workspace(),
// run().
#pragma once

#include <map>
#include <string>
#include <vector>

#include "support/reference_call.hpp"

extern "C" const te_fl_plugin_header* te_fl_cpu_query(const te_fl_host_info*);

namespace te_fl::testing {

inline const te_fl_op_desc* cpu_op(const std::string& name) {
  static const std::map<std::string, const te_fl_op_desc*> ops = [] {
    const te_fl_host_info info{sizeof info, TE_FL_ABI_MAJOR, TE_FL_ABI_MINOR, 0, "test"};
    const te_fl_plugin_api& api = *te_fl_cpu_query(&info)->api;
    te_fl_host_api host{};
    host.struct_size = sizeof host;
    static void* instance = nullptr;  // never destroyed: its descriptors are used until exit
    uint32_t n = 0;
    const te_fl_op_desc* const* list = nullptr;
    EXPECT_EQ(api.create(&host, &instance, nullptr), TE_FL_OK);
    EXPECT_EQ(api.ops(instance, &n, &list, nullptr), TE_FL_OK);
    std::map<std::string, const te_fl_op_desc*> result;
    for (uint32_t i = 0; i < n; ++i) result[list[i]->op_name] = list[i];
    return result;
  }();
  const auto found = ops.find(name);
  return found == ops.end() ? nullptr : found->second;
}

template <class Args>
Outcome run_cpu(const char* op, const Args& args, te_fl_rng rng = {}) {
  std::string text;
  te_fl_error_sink sink{};
  sink.struct_size = sizeof sink;
  sink.host = &text;
  sink.write = [](void* host, const char* message) { *static_cast<std::string*>(host) += message; };
  te_fl_context ctx{};
  ctx.struct_size = sizeof ctx;
  ctx.device = {TE_FL_DEVICE_CPU, 0};
  ctx.rng = &rng;
  ctx.errors = &sink;
  const te_fl_op_desc* desc = cpu_op(op);
  if (desc == nullptr) return {TE_FL_NOT_FOUND, std::string("no ") + op};
  te_fl_status status = TE_FL_OK;
  if (desc->supports != nullptr) status = desc->supports(desc->self, &ctx, &args);
  size_t bytes = 0;
  if (status == TE_FL_OK && desc->workspace != nullptr) {
    status = desc->workspace(desc->self, &ctx, &args, &bytes);
  }
  if (status != TE_FL_OK) return {status, text};
  // Scratch is filled with 0xFF, so that an op that assumes zeros there fails.
  std::vector<uint8_t> memory(bytes + 256, 0xFF);
  ctx.workspace = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256);
  ctx.workspace_bytes = bytes;
  if (bytes == 0) ctx.workspace = nullptr;
  return {desc->run(desc->self, &ctx, &args), text};
}

}  // namespace te_fl::testing
