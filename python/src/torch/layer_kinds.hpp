// A common interface of te_fl::nn's modules, constructed from Python's keyword arguments.
#pragma once

#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "py/py.hpp"
#include "te_fl/nn/modules/attention.hpp"
#include "te_fl/nn/modules/module.hpp"

namespace te_fl::python {

// One module of te_fl::nn. The functions behave as the module's own functions; `inputs` has as many
// tensors as this kind of module has inputs.
class Runner {
 public:
  virtual ~Runner() = default;
  virtual nn::Module& module() = 0;
  // The shape of forward()'s result.
  virtual Shape output_shape(const std::vector<Tensor>& inputs) const = 0;
  // The module's parameters in the module's order; cached.
  const std::vector<nn::NamedParameter>& parameters() {
    if (parameters_.empty()) parameters_ = module().parameters();
    return parameters_;
  }
  virtual Result<Tensor> forward(const std::vector<Tensor>& inputs, nn::Ctx* ctx,
                                 const nn::AttentionInputs& attention,
                                 const nn::ForwardOptions& options) = 0;
  // The gradients of the inputs. The gradient of AttentionInputs::bias follows if the kind takes a
  // bias and the forward had one.
  virtual Result<std::vector<Tensor>> backward(const Tensor& dy, nn::Ctx& ctx) = 0;

 private:
  std::vector<nn::NamedParameter> parameters_;
};

using MakeRunner = std::function<Result<std::unique_ptr<Runner>>(DType activation_dtype)>;

// `options`: a dict with the fields of the kind's options struct in te_fl::nn, without
// activation_dtype and seed. Dtypes, devices and enums are te-fl's strings. TypeError names a field
// that the kind does not have.
MakeRunner make_runner(std::string_view kind, PyObject* options);

}  // namespace te_fl::python
