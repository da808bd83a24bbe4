#include "plugin/entry.hpp"

#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExt.h>

#include <deque>
#include <string>

#include "te_fl/backend.hpp"

namespace te_fl::cuda {
namespace {

constexpr uintptr_t kWorkspaceAlignment = 256;

struct Entry {
  te_fl_op_desc inner;
  nvtxDomainHandle_t domain = nullptr;
  nvtxStringHandle_t label = nullptr;
};
const Entry& entry_of(void* self) { return *static_cast<const Entry*>(self); }

te_fl_status refuse_workspace(const Entry& e, const te_fl_context& ctx, size_t wanted) noexcept {
  return backend::guard(ctx.errors, [&] {
    const std::string op = e.inner.op_name;
    if (ctx.workspace_bytes < wanted) {
      backend::invalid(op + ": ctx.workspace has " + std::to_string(ctx.workspace_bytes) +
                       " bytes, must have " + std::to_string(wanted) +
                       " for these arguments; pass as many bytes as workspace() returns");
    }
    backend::invalid(op +
                     ": ctx.workspace is not aligned to 256 bytes (rule R11); pass aligned "
                     "memory of the device");
  });
}

// Refuses cudaStreamPerThread. The host keeps scratch per stream handle, but this handle is a
// different stream in each thread.
te_fl_status refuse_stream(const Entry& e, const te_fl_context& ctx) noexcept {
  return backend::guard(ctx.errors, [&] {
    backend::invalid(std::string(e.inner.op_name) +
                     ": ctx.stream is cudaStreamPerThread, which is another stream in every "
                     "thread, so threads would share scratch memory without waiting for each "
                     "other; give a stream made by te_fl::Stream::create or cudaStreamCreate, or "
                     "NULL");
  });
}

te_fl_status checked_run(void* self, const te_fl_context* ctx, const void* args) noexcept {
  const Entry& e = entry_of(self);
  if (e.inner.workspace != nullptr) {
    size_t wanted = 0;
    const te_fl_status code = e.inner.workspace(e.inner.self, ctx, args, &wanted);
    if (code != TE_FL_OK) return code | TE_FL_CLEAN;
    if (wanted > 0 && ctx->stream == cudaStreamPerThread) return refuse_stream(e, *ctx);
    const bool aligned = reinterpret_cast<uintptr_t>(ctx->workspace) % kWorkspaceAlignment == 0;
    if (wanted > 0 && (ctx->workspace_bytes < wanted || !aligned)) {
      return refuse_workspace(e, *ctx, wanted);
    }
  }
  return e.inner.run(e.inner.self, ctx, args);
}

te_fl_status marked_run(void* self, const te_fl_context* ctx, const void* args) noexcept {
  const Entry& e = entry_of(self);
  nvtxEventAttributes_t event{};
  event.version = NVTX_VERSION;
  event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  event.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
  event.message.registered = e.label;
  nvtxDomainRangePushEx(e.domain, &event);
  const te_fl_status code = checked_run(self, ctx, args);
  nvtxDomainRangePop(e.domain);
  return code;
}

te_fl_status supports(void* self, const te_fl_context* ctx, const void* args) noexcept {
  const te_fl_op_desc& inner = entry_of(self).inner;
  return inner.supports(inner.self, ctx, args);
}
te_fl_status workspace(void* self, const te_fl_context* ctx, const void* args,
                       size_t* bytes) noexcept {
  const te_fl_op_desc& inner = entry_of(self).inner;
  return inner.workspace(inner.self, ctx, args, bytes);
}
te_fl_status saved_bytes(void* self, const te_fl_context* ctx, const void* args,
                         size_t* bytes) noexcept {
  const te_fl_op_desc& inner = entry_of(self).inner;
  return inner.saved_bytes(inner.self, ctx, args, bytes);
}
te_fl_status describe(void* self, const te_fl_context* ctx, const void* args,
                      const te_fl_error_sink* text) noexcept {
  const te_fl_op_desc& inner = entry_of(self).inner;
  return inner.describe(inner.self, ctx, args, text);
}
te_fl_status prepare(void* self, const te_fl_context* ctx, const void* args, void** plan) noexcept {
  const te_fl_op_desc& inner = entry_of(self).inner;
  return inner.prepare(inner.self, ctx, args, plan);
}
void destroy_plan(void* self, void* plan) noexcept {
  const te_fl_op_desc& inner = entry_of(self).inner;
  inner.destroy_plan(inner.self, plan);
}

}  // namespace

struct Entries::Impl {
  nvtxDomainHandle_t domain = nullptr;
  bool ranges = false;
  std::deque<Entry> entries;  // a deque, because the descriptors hold the entries' addresses
};

Entries::Entries(bool ranges) : impl_(std::make_unique<Impl>()) {
  impl_->ranges = ranges;
  if (ranges) impl_->domain = nvtxDomainCreateA("te-fl");
}
Entries::~Entries() {
  if (impl_->ranges) nvtxDomainDestroy(impl_->domain);
}

void Entries::wrap(std::vector<te_fl_op_desc>& ops) {
  for (te_fl_op_desc& op : ops) {
    if (op.workspace == nullptr && !impl_->ranges) continue;
    Entry& e = impl_->entries.emplace_back();
    e.inner = op;
    if (impl_->ranges) {
      e.domain = impl_->domain;
      const std::string label = std::string(op.op_name) + " " + op.impl_id;
      e.label = nvtxDomainRegisterStringA(e.domain, label.c_str());
    }
    op.self = &e;
    op.run = impl_->ranges ? marked_run : checked_run;
    if (op.supports != nullptr) op.supports = supports;
    if (op.workspace != nullptr) op.workspace = workspace;
    if (op.saved_bytes != nullptr) op.saved_bytes = saved_bytes;
    if (op.describe != nullptr) op.describe = describe;
    if (op.prepare != nullptr) op.prepare = prepare;
    if (op.destroy_plan != nullptr) op.destroy_plan = destroy_plan;
  }
}

}  // namespace te_fl::cuda
