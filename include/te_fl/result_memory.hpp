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

// Lets a framework provide the memory of the tensors that a call of nn returns, so that the
// framework owns this memory. While a ResultMemory lives, every Tensor::empty() on the calling
// thread first calls `make`. Scopes nest; only the innermost is called. Destroy them in reverse
// order, on the same thread.
class TE_FL_API ResultMemory {
 public:
  // Returns compact memory for a tensor of this shape and dtype on the device, or null:
  // Tensor::empty() then allocates as usual. The memory is released when the result's last copy is
  // destroyed, on any thread. Its alignment is the framework's, not that of Tensor::empty().
  // Tensor::empty() returns an error of this function to its caller. No lock of te-fl is held
  // during the call.
  using Make = std::function<Result<std::shared_ptr<void>>(std::span<const int64_t> shape,
                                                           DType dtype, const Device& device)>;
  explicit ResultMemory(Make make);
  ~ResultMemory();
  ResultMemory(const ResultMemory&) = delete;
  ResultMemory& operator=(const ResultMemory&) = delete;
  const Make& make() const noexcept { return make_; }
  // The calling thread's innermost ResultMemory, or null.
  static const ResultMemory* innermost() noexcept;

 private:
  Make make_;
  const ResultMemory* outer_;
};

}  // namespace te_fl
