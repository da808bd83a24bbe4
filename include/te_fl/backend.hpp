#pragma once

// For writers of backends in C++ (C99 needs only plugin.h): exceptions become statuses at the
// boundary, argument structs of older callers are widened, tensors get small accessors.
// Header-only; depends on plugin.h alone, so that a plugin does not link with libte_fl.

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

// Thrown inside a backend, caught by the wrappers below. Clean: nothing written, nothing enqueued.
class Error : public std::exception {
 public:
  Error(te_fl_status status, std::string text) : status_(status), text_(std::move(text)) {}
  te_fl_status status() const noexcept { return status_; }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  te_fl_status status_;
  std::string text_;
};

// Use before anything is written.
[[noreturn]] inline void invalid(std::string text) {
  throw Error(TE_FL_INVALID_ARGUMENT | TE_FL_CLEAN, std::move(text));
}
[[noreturn]] inline void unsupported(std::string text) {
  throw Error(TE_FL_UNSUPPORTED, std::move(text));
}

inline void report(const te_fl_error_sink* sink, const char* text) noexcept {
  if (sink != nullptr && sink->write != nullptr) sink->write(sink->host, text);
}

// Runs f, turning exceptions into statuses.
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

// Reads an argument struct that may be smaller than ours (R3): members beyond it get their
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

// te_fl_op_desc.run made from `void F(const te_fl_context&, const Args&)`. Likewise supports() and
// workspace().
template <class Args, auto F>
te_fl_status run_thunk(void*, const te_fl_context* ctx, const void* raw) noexcept {
  return guard(ctx->errors, [&] {
    Widened<Args> args(raw);
    F(*ctx, *args);
  });
}
// F returns void and throws (unsupported(...)) to refuse. For cheap refusals write a C function
// instead.
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

// Seed and offset of a call on the host, read from their addresses where it has some.
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

// The logical matrix [M, K] of quantisation: K is the last extent, M the product of the others; a
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

// "[2,3]"; for messages.
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

// Stride of dimension i in elements, also when strides is NULL.
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
