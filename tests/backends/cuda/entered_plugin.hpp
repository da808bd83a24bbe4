// Loads the CUDA plugin through its entry point, as a host does, with fake GPU tensors.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "te_fl/plugin.h"

namespace te_fl::cuda::entered {

struct Text {
  std::string text;
  te_fl_error_sink sink{sizeof(te_fl_error_sink), 0, this,
                        [](void* host, const char* t) { static_cast<Text*>(host)->text += t; }};
};

// A plugin instance that has been created.
class Plugin {
 public:
  using Settings = std::map<std::string, std::string>;
  explicit Plugin(Settings settings = Settings()) : settings_(std::move(settings)) {
    void* library = dlopen(TE_FL_CUDA_PLUGIN, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) std::abort();
    const auto query =
        reinterpret_cast<te_fl_plugin_query_fn>(dlsym(library, TE_FL_PLUGIN_QUERY_SYMBOL));
    te_fl_host_info info{};
    info.struct_size = sizeof info;
    api_ = *query(&info)->api;
    host_.struct_size = sizeof host_;
    host_.host = this;
    host_.setting = [](void* host, const char* name) -> const char* {
      const auto& s = static_cast<Plugin*>(host)->settings_;
      const auto found = s.find(name);
      return found == s.end() ? nullptr : found->second.c_str();
    };
    Text errors;
    EXPECT_EQ(api_.create(&host_, &instance_, &errors.sink), TE_FL_OK) << errors.text;
  }
  ~Plugin() { api_.destroy(instance_); }
  Plugin(const Plugin&) = delete;
  Plugin& operator=(const Plugin&) = delete;

  const te_fl_op_desc& op(const std::string& name, const std::string& impl = "vendor.cuda") {
    uint32_t count = 0;
    const te_fl_op_desc* const* list = nullptr;
    EXPECT_EQ(api_.ops(instance_, &count, &list, nullptr), TE_FL_OK);
    for (uint32_t i = 0; i < count; ++i) {
      if (name == list[i]->op_name && impl == list[i]->impl_id) return *list[i];
    }
    std::abort();
  }
  std::vector<const te_fl_op_desc*> all_ops() {
    uint32_t count = 0;
    const te_fl_op_desc* const* list = nullptr;
    EXPECT_EQ(api_.ops(instance_, &count, &list, nullptr), TE_FL_OK);
    return {list, list + count};
  }
  // Returns the plugin's only collectives provider.
  const te_fl_comm_desc& comm() {
    uint32_t count = 0;
    const te_fl_comm_desc* const* list = nullptr;
    EXPECT_EQ(api_.comms(instance_, &count, &list, nullptr), TE_FL_OK);
    if (count != 1) std::abort();
    return *list[0];
  }
  bool has_device() {
    uint32_t count = 0;
    const te_fl_device_desc* const* list = nullptr;
    EXPECT_EQ(api_.devices(instance_, &count, &list, nullptr), TE_FL_OK);
    return count > 0;
  }
  std::vector<te_fl_finding> findings(std::vector<std::string>& texts) {
    struct Out {
      std::vector<te_fl_finding> list;
      std::vector<std::string>& texts;
    } out{{}, texts};
    te_fl_finding_sink sink{};
    sink.struct_size = sizeof sink;
    sink.host = &out;
    sink.write = [](void* host, const te_fl_finding* f) {
      auto* o = static_cast<Out*>(host);
      o->list.push_back(*f);
      const auto or_empty = [](const char* s) { return std::string(s == nullptr ? "" : s); };
      o->texts.push_back(or_empty(f->subject) + " | " + or_empty(f->state) + " | " +
                         or_empty(f->disables) + " | " + or_empty(f->remedy));
    };
    Text errors;
    EXPECT_EQ(api_.diagnose(instance_, &sink, &errors.sink), TE_FL_OK) << errors.text;
    return out.list;
  }

 private:
  Settings settings_;
  te_fl_plugin_api api_{};
  te_fl_host_api host_{};
  void* instance_ = nullptr;
};

// A tensor that claims to be on GPU 0; its memory is host memory and must not be accessed.
struct Fake {
  std::vector<int64_t> shape;
  te_fl_quant quant;
  te_fl_tensor tensor;
  Fake(std::vector<int64_t> s, te_fl_dtype dtype, uint32_t scaling = TE_FL_SCALING_NONE)
      : shape(std::move(s)) {
    tensor.dl = {memory(), {TE_FL_DEVICE_CUDA, 0}, static_cast<int32_t>(shape.size()),
                 dtype,    shape.data(),           nullptr,
                 0};
    if (scaling == TE_FL_SCALING_NONE) return;
    quant.scaling = scaling;
    quant.scale_inv = memory();
    tensor.quant = &quant;
  }
  static void* memory() {
    alignas(256) static char bytes[1 << 20];
    static size_t used = 0;
    used = (used + 4096) % sizeof bytes;
    return bytes + used;
  }
};

inline constexpr te_fl_dtype kF32{TE_FL_CODE_FLOAT, 32, 1}, kE4M3{TE_FL_CODE_FLOAT8_E4M3FN, 8, 1};

}  // namespace te_fl::cuda::entered
