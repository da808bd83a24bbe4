// XLA FFI handlers that run te-fl's ops. They use XLA's C ABI (xla_ffi.hpp) and need neither Python
// nor jaxlib.
#pragma once

#include <cstdint>

#include "jax/xla_ffi.hpp"

namespace te_fl::jax {

// One handler runs all ops of a platform; the call's text names the op (jax_call.hpp).
xla::Error* handle_on_host(xla::CallFrame* call) noexcept;
xla::Error* handle_on_cuda(xla::CallFrame* call) noexcept;

// The FFI version that XLA reported at registration, as major * 1000 + minor; -1 before
// registration.
int32_t seen_version() noexcept;
// True while the calling thread is inside a handler.
bool in_handler() noexcept;

}  // namespace te_fl::jax
