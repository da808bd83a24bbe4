#pragma once

// Helpers for backends in C++ (C99 needs only plugin.h). They turn exceptions into statuses at the
// boundary, fill in the members that an older caller's argument struct lacks, and give access to
// tensors. Header-only; depends on plugin.h alone, so that a plugin does not link with libte_fl.

#include <cstdint>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "te_fl/plugin.h"

namespace te_fl::backend {

// Exception for errors inside a backend. The wrappers below catch it and return its status. Throw
// an Error with TE_FL_CLEAN only if nothing has been written and nothing has been enqueued.
class Error : public std::exception {
 public:
  Error(te_fl_status status, std::string text) : status_(status), text_(std::move(text)) {}
  te_fl_status status() const noexcept { return status_; }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  te_fl_status status_;
  std::string text_;
};

// Throw an Error. Call these before anything has been written.
[[noreturn]] inline void invalid(std::string text) {
  throw Error(TE_FL_INVALID_ARGUMENT | TE_FL_CLEAN, std::move(text));
}
[[noreturn]] inline void unsupported(std::string text) {
  throw Error(TE_FL_UNSUPPORTED, std::move(text));
}

inline void report(const te_fl_error_sink* sink, const char* text) noexcept {
  if (sink != nullptr && sink->write != nullptr) sink->write(sink->host, text);
}

// Calls f and turns exceptions into statuses.
template <class F>
te_fl_status guard(const te_fl_error_sink* sink, F&& f) noexcept {
  try {
    std::forward<F>(f)();
    return TE_FL_OK;
  } catch (const Error& e) {
    report(sink, e.what());
    return e.status();
  } catch (const std::bad_alloc&) {
    report(sink, "out of host memory");
    return TE_FL_OUT_OF_MEMORY;
  } catch (const std::exception& e) {
    report(sink, e.what());
    return TE_FL_INTERNAL;
  } catch (...) {
    report(sink, "an exception of unknown type");
    return TE_FL_INTERNAL;
  }
}

// Reads an argument struct that may be smaller than this header's (R3). Missing members get their
// defaults.
template <class Args>
class Widened {
 public:
  explicit Widened(const void* raw) noexcept {
    uint32_t size;
    std::memcpy(&size, raw, sizeof size);
    if (size >= sizeof(Args)) {
      args_ = static_cast<const Args*>(raw);
    } else {
      Args& local = local_.emplace();
      std::memcpy(static_cast<void*>(&local), raw, size);
      local.struct_size = sizeof(Args);
      args_ = &local;
    }
  }
  Widened(const Widened&) = delete;
  Widened& operator=(const Widened&) = delete;
  const Args& operator*() const noexcept { return *args_; }

 private:
  std::optional<Args> local_;
  const Args* args_;
};

// Makes a C function for te_fl_op_desc.run from `void F(const te_fl_context&, const Args&)`.
// supports_thunk and workspace_thunk do the same for supports() and workspace().
template <class Args, auto F>
te_fl_status run_thunk(void*, const te_fl_context* ctx, const void* raw) noexcept {
  return guard(ctx->errors, [&] {
    Widened<Args> args(raw);
    F(*ctx, *args);
  });
}
// F returns void and refuses a call by throwing, as unsupported(...) does. If refusals must be
// cheap, write a C function instead, since exceptions are slow.
template <class Args, auto F>
te_fl_status supports_thunk(void*, const te_fl_context* ctx, const void* raw) noexcept {
  return guard(ctx->errors, [&] {
    Widened<Args> args(raw);
    F(*ctx, *args);
  });
}
template <class Args, auto F>
te_fl_status workspace_thunk(void*, const te_fl_context* ctx, const void* raw,
                             size_t* bytes) noexcept {
  return guard(ctx->errors, [&] {
    Widened<Args> args(raw);
    *bytes = F(*ctx, *args);
  });
}

// Seed and offset of a call on the host. A value at an address replaces the seed and is added to
// the offset (te_fl_rng).
struct RandomState {
  uint64_t seed = 0;
  uint64_t offset = 0;
  explicit RandomState(const te_fl_rng& rng) noexcept
      : seed(rng.seed_address != nullptr ? *rng.seed_address : rng.seed),
        offset(rng.offset + (rng.offset_address != nullptr ? *rng.offset_address : 0)) {}
};

// ---- tensors

inline int64_t numel(const te_fl_tensor& t) noexcept {
  int64_t n = 1;
  for (int i = 0; i < t.dl.ndim; ++i) n *= t.dl.shape[i];
  return n;
}

// The matrix [M, K] that quantisation sees: K is the last extent, M the product of the others. A
// scalar is [1, 1].
struct Matrix {
  int64_t rows = 1;
  int64_t cols = 1;
};
inline Matrix as_matrix(const te_fl_tensor& t) noexcept {
  Matrix m;
  for (int i = 0; i + 1 < t.dl.ndim; ++i) m.rows *= t.dl.shape[i];
  if (t.dl.ndim > 0) m.cols = t.dl.shape[t.dl.ndim - 1];
  return m;
}

// The shape as text for messages, "[2,3]".
inline std::string shape_text(const te_fl_tensor& t) {
  std::string s = "[";
  for (int i = 0; i < t.dl.ndim; ++i) {
    if (i > 0) s += ",";
    s += std::to_string(t.dl.shape[i]);
  }
  return s += "]";
}

inline bool is_contiguous(const te_fl_tensor& t) noexcept {
  if (t.dl.strides == nullptr) return true;
  int64_t expected = 1;
  for (int i = t.dl.ndim - 1; i >= 0; --i) {
    if (t.dl.shape[i] == 0) return true;
    if (t.dl.shape[i] != 1 && t.dl.strides[i] != expected) return false;
    expected *= t.dl.shape[i];
  }
  return true;
}

// Stride of dimension i in elements; also works if strides is NULL.
inline int64_t stride(const te_fl_tensor& t, int i) noexcept {
  if (t.dl.strides != nullptr) return t.dl.strides[i];
  int64_t s = 1;
  for (int j = t.dl.ndim - 1; j > i; --j) s *= t.dl.shape[j];
  return s;
}

template <class T>
T* data(const te_fl_tensor& t) noexcept {
  return t.dl.data == nullptr
             ? nullptr
             : reinterpret_cast<T*>(static_cast<char*>(t.dl.data) + t.dl.byte_offset);
}

inline uint32_t scaling(const te_fl_tensor& t) noexcept {
  return t.quant == nullptr ? static_cast<uint32_t>(TE_FL_SCALING_NONE) : t.quant->scaling;
}

}  // namespace te_fl::backend
