// An op implementation written in Python, wrapped in a te_fl_op_desc.
#pragma once

#include <memory>
#include <string>

#include "ops/op_binding.hpp"
#include "plugins/call_arguments.hpp"
#include "plugins/repeated_calls.hpp"
#include "py/py.hpp"
#include "te_fl/plugin.h"

namespace te_fl::python {

// Sets two functions of te_fl.registration: `describe_error` formats an exception as text, and
// `on_stream` runs a function on a PyTorch stream.
void set_helpers(PyObject* describe_error, PyObject* on_stream);

class Implementation {
 public:
  // Builds the object from te_fl.registration's dict of an OpImpl. For a function op
  // (function_op.hpp) the dict has no "arguments". Throws PythonError.
  static std::shared_ptr<Implementation> make(PyObject* options);
  ~Implementation();
  Implementation(const Implementation&) = delete;
  Implementation& operator=(const Implementation&) = delete;

  // Valid while this object lives. The registry owns the object until no call can use it.
  const te_fl_op_desc& desc() const noexcept { return desc_; }

 private:
  Implementation() = default;
  // Runs the function that repeats an earlier call. Returns its result.
  Ref repeat(PyObject* function, const FlatCall& call, const te_fl_context& ctx,
             const std::shared_ptr<Lending>& lending) const;
  static te_fl_status run(void* self, const te_fl_context* ctx, const void* args) noexcept;
  static te_fl_status supports(void* self, const te_fl_context* ctx, const void* args) noexcept;
  static te_fl_status describe(void* self, const te_fl_context* ctx, const void* args,
                               const te_fl_error_sink* text) noexcept;
  static te_fl_status run_function(void* self, const te_fl_context* ctx, const void*) noexcept;
  static te_fl_status supports_function(void* self, const te_fl_context* ctx, const void*) noexcept;

  const OpBinding* op_ = nullptr;  // null: a function op
  PyObject *fn_ = nullptr, *supports_ = nullptr, *convert_ = nullptr, *supports_convert_ = nullptr,
           *repeat_ = nullptr;  // owned; the last two may be null
  mutable RepeatedCalls repeated_;
  Wanted arguments_, supports_arguments_;
  std::string op_name_, impl_id_, vendor_, provider_, later_, words_;
  te_fl_op_desc desc_{};
};

}  // namespace te_fl::python
