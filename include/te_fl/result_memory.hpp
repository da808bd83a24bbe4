#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "te_fl/device.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/export.hpp"
#include "te_fl/status.hpp"

namespace te_fl {

// Memory of a framework's tensors for what a call of nn returns, so that the framework knows the
// memory as its own. While it lives, every Tensor::empty() on the calling thread asks `make` first.
// Scopes nest; the innermost alone is asked. Destroy them in reverse order, on the same thread.
class TE_FL_API ResultMemory {
 public:
  // Compact memory for a tensor of this shape and dtype on the device, which is freed when the
  // result's last copy goes, on any thread; null: Tensor::empty() allocates as it does otherwise.
  // The alignment is the framework's, not Tensor::empty()'s. An error becomes Tensor::empty()'s. It
  // runs without any of te-fl's locks.
  using Make = std::function<Result<std::shared_ptr<void>>(std::span<const int64_t> shape,
                                                           DType dtype, const Device& device)>;
  explicit ResultMemory(Make make);
  ~ResultMemory();
  ResultMemory(const ResultMemory&) = delete;
  ResultMemory& operator=(const ResultMemory&) = delete;
  const Make& make() const noexcept { return make_; }
  // The calling thread's innermost one, or null.
  static const ResultMemory* innermost() noexcept;

 private:
  Make make_;
  const ResultMemory* outer_;
};

}  // namespace te_fl
