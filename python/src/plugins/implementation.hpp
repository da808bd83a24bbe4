// One implementation in Python, as te-fl's descriptor calls it.
#pragma once

#include <memory>
#include <string>

#include "ops/op_binding.hpp"
#include "plugins/call_arguments.hpp"
#include "py/py.hpp"
#include "te_fl/plugin.h"

namespace te_fl::python {

// Takes two functions of te_fl.registration: `told` makes words about an exception, and `on_stream`
// runs a function on a stream of PyTorch's.
void set_helpers(PyObject* told, PyObject* on_stream);

class Implementation {
 public:
  // From the dict that te_fl.registration makes of an OpImpl; one of a function op's
  // (function_op.hpp) has no "arguments". Throws PythonError.
  static std::shared_ptr<Implementation> make(PyObject* options);
  ~Implementation();
  Implementation(const Implementation&) = delete;
  Implementation& operator=(const Implementation&) = delete;

  // Valid while this object lives, which the registry holds until no call can use it.
  const te_fl_op_desc& desc() const noexcept { return desc_; }

 private:
  Implementation() = default;
  static te_fl_status run(void* self, const te_fl_context* ctx, const void* args) noexcept;
  static te_fl_status supports(void* self, const te_fl_context* ctx, const void* args) noexcept;
  static te_fl_status describe(void* self, const te_fl_context* ctx, const void* args,
                               const te_fl_error_sink* text) noexcept;
  static te_fl_status run_function(void* self, const te_fl_context* ctx, const void*) noexcept;
  static te_fl_status supports_function(void* self, const te_fl_context* ctx, const void*) noexcept;

  const OpBinding* op_ = nullptr;  // null: a function op
  PyObject *fn_ = nullptr, *supports_ = nullptr,
           *convert_ = nullptr;  // owned; the last may be null
  Wanted arguments_, supports_arguments_;
  std::string op_name_, impl_id_, vendor_, provider_, later_, words_;
  te_fl_op_desc desc_{};
};

}  // namespace te_fl::python
