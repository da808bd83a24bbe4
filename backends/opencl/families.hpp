// The op families of this backend and the functions that append their descriptors.
#pragma once

#include <type_traits>
#include <vector>

#include "cl_check.hpp"
#include "device.hpp"
#include "te_fl/backend/refusal.hpp"

namespace te_fl::opencl {

using backend::Refusal;

// The first parameter of an op's run function: the device of its tensors and the context.
struct DeviceCall {
  const Device& device;
  const te_fl_context& context;
  void* stream() const { return context.stream; }
};

inline const Device& device_of(void* self, const te_fl_context& ctx) noexcept {
  return *(*static_cast<const Devices*>(self))[static_cast<size_t>(ctx.device.index)];
}

template <class Args, auto F>
te_fl_status supports(void* self, const te_fl_context* ctx, const void* raw) noexcept {
  const backend::Widened<Args> args(raw);
  Refusal refusal = nullptr;
  if constexpr (std::is_invocable_v<decltype(F), const Device&, const Args&>) {
    refusal = F(device_of(self, *ctx), *args);
  } else {
    refusal = F(*args);
  }
  if (refusal == nullptr) return TE_FL_OK;
  backend::report(ctx->errors, refusal);
  return TE_FL_UNSUPPORTED;
}

template <class Args, auto F>
te_fl_status run(void* self, const te_fl_context* ctx, const void* raw) noexcept {
  return backend::guard(ctx->errors, [&] {
    refuse_after_fork();
    const backend::Widened<Args> args(raw);
    F(DeviceCall{device_of(self, *ctx), *ctx}, *args);
  });
}

template <class Args, auto F>
te_fl_status workspace(void*, const te_fl_context* ctx, const void* raw, size_t* bytes) noexcept {
  return backend::guard(ctx->errors, [&] {
    const backend::Widened<Args> args(raw);
    *bytes = F(*args);
  });
}

// The descriptor of one op, which is run by `void F(const DeviceCall&, const Args&)`. Refuses: a
// function `Refusal (const Args&)` or `Refusal (const Device&, const Args&)` that returns why a
// call is not supported. Workspace: a function `size_t (const Args&)` that returns the workspace in
// bytes, or nullptr. The plugin sets the descriptor's `self`.
template <class Args, auto F, auto Refuses, auto Workspace = nullptr>
te_fl_op_desc descriptor(const char* op_name) {
  te_fl_op_desc desc;
  desc.op_name = op_name;
  desc.impl_id = "default.opencl";
  desc.kind = TE_FL_KIND_DEFAULT;
  desc.flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_DETERMINISTIC | TE_FL_OP_IN_PLACE_OK;
  desc.device_types = uint64_t{1} << TE_FL_DEVICE_OPENCL;
  desc.scalings = TE_FL_BIT(TE_FL_SCALING_NONE) | TE_FL_BIT(TE_FL_SCALING_TENSOR);
  desc.run = run<Args, F>;
  desc.supports = supports<Args, Refuses>;
  if constexpr (!std::is_same_v<decltype(Workspace), std::nullptr_t>) {
    desc.workspace = workspace<Args, Workspace>;
  }
  return desc;
}

// Each function appends the descriptors of one family and is defined in <family>.cpp.
using Ops = std::vector<te_fl_op_desc>;
void append_activation(Ops& ops);
void append_tensor(Ops& ops);
void append_dropout(Ops& ops);
void append_gemm(Ops& ops);
void append_optimizer(Ops& ops);
void append_rope(Ops& ops);
void append_norm(Ops& ops);
void append_quantize(Ops& ops);
void append_softmax(Ops& ops);

}  // namespace te_fl::opencl
