// A plugin of the reference's implementations of which one op has one planted error. The variable
// MUTANT has the error (mutation.hpp); "OP: none" is the op without an error. The plugin has only
// that op, or only a device whose copies or fills above a size lose their last byte
// (mutant_device.hpp). tools/mutants.py runs te-fl check on it, or a training. If the variable
// MUTANT_CHANGES is set, it names a file, and each call whose results the error changes appends a
// line to that file. Never installed.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/op/op_table.hpp"
#include "fault.hpp"
#include "mutant_device.hpp"
#include "te_fl/backend/plugin.hpp"

extern "C" const te_fl_plugin_header* te_fl_reference_query(const te_fl_host_info*);

namespace te_fl::mutants {
namespace {

const te_fl_op_schema& schema_of(const std::string& op) {
  for (const te_fl_op_schema* schema : core::catalogue())
    if (op == schema->name) return *schema;
  throw std::invalid_argument("no op is named " + op);
}

struct Plugin : backend::DeviceInstance {
  explicit Plugin(const te_fl_host_api& host) {
    const char* text = std::getenv("MUTANT");
    if (text == nullptr) throw std::invalid_argument("the variable MUTANT names no mutation");
    const std::string line = text;
    if (line.rfind("device", 0) == 0) {
      device = std::make_unique<MutantDevice>(line);
      devices.push_back(&device->desc);
      return;
    }
    const size_t plain = line.find(": none");
    if (plain != std::string::npos)
      mutation.op = line.substr(0, plain);
    else
      mutation = parse(line), wrong = true;
    schema = &schema_of(mutation.op);
    const te_fl_plugin_api& reference = *te_fl_reference_query(nullptr)->api;
    if (reference.create(&host, &reference_, nullptr) != TE_FL_OK)
      throw std::runtime_error("the reference was not created");
    uint32_t count = 0;
    const te_fl_op_desc* const* list = nullptr;
    reference.ops(reference_, &count, &list, nullptr);
    for (uint32_t i = 0; i < count; ++i)
      if (mutation.op == list[i]->op_name) right = list[i];
    if (right == nullptr) throw std::invalid_argument("the reference lacks " + mutation.op);
    te_fl_op_desc& desc = ops.emplace_back(*right);
    desc.impl_id = "vendor.mutant", desc.kind = TE_FL_KIND_VENDOR;
    desc.self = this, desc.run = run;
  }
  ~Plugin() {
    if (reference_ != nullptr) te_fl_reference_query(nullptr)->api->destroy(reference_);
  }
  Plugin(const Plugin&) = delete;
  Plugin& operator=(const Plugin&) = delete;

  static te_fl_status run(void* self, const te_fl_context* ctx, const void* args) {
    const auto& plugin = *static_cast<const Plugin*>(self);
    const te_fl_op_desc& right = *plugin.right;
    te_fl_status status = TE_FL_OK;
    const te_fl_status thrown = backend::guard(ctx->errors, [&] {
      MutableCall call(*plugin.schema, args);
      bool acts = plugin.wrong;
      for (const Condition& c : plugin.mutation.conditions) acts = acts && call.fulfils(c);
      const auto run_right = [&](const te_fl_context& c, const void* a) {
        return right.run(right.self, &c, a);
      };
      if (!acts) {
        status = right.run(right.self, ctx, args);
      } else if (plugin.changes == nullptr) {
        status = run_wrong(plugin.mutation, *ctx, call, run_right);
      } else {
        bool changed = false;
        status = run_both(plugin.mutation, *ctx, call, run_right, changed);
        if (changed) plugin.note_change();
      }
    });
    return thrown != TE_FL_OK ? thrown : status;
  }

  void note_change() const {
    std::FILE* const file = std::fopen(changes, "a");
    if (file == nullptr) throw std::runtime_error(std::string("cannot write ") + changes);
    std::fputs("changed\n", file);
    std::fclose(file);
  }

  const char* const changes = std::getenv("MUTANT_CHANGES");
  std::unique_ptr<MutantDevice> device;
  Mutation mutation;
  bool wrong = false;
  const te_fl_op_schema* schema = nullptr;
  const te_fl_op_desc* right = nullptr;  // the reference's

 private:
  void* reference_ = nullptr;
};

constexpr te_fl_plugin_header kHeader = backend::plugin_header<Plugin>("mutant", "mutant", "1.0.0");

}  // namespace
}  // namespace te_fl::mutants

extern "C" TE_FL_PLUGIN_EXPORT const te_fl_plugin_header* te_fl_plugin_query(
    const te_fl_host_info*) {
  return &te_fl::mutants::kHeader;
}
