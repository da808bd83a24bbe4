// Borrows the framework's parameters for one call of a layer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "py/py.hpp"
#include "torch/layer_object.hpp"
#include "torch/lent_parameter.hpp"
#include "torch/recompute.hpp"

namespace te_fl::python {

// The mode of a forward: kTraining saves what a backward needs, and kUncached is inference without
// cached weights. A larger value is the number of the scope in which quantised weights are cached.
constexpr long long kTraining = 0, kUncached = 1;

// The parameters in the layer's order. Needs the interpreter's lock; throws TypeError if their
// number differs from the layer's.
std::vector<LentParameter> lend_parameters(const Layer& layer, std::span<PyObject* const> objects,
                                           bool training);
// The mode of a forward that is not training: the number of the calling thread's outermost scope in
// which quantised weights are cached, or kUncached. Needs the interpreter's lock.
long long caching_mode(std::span<PyObject* const> parameters);
// The requires_grad of each parameter. Needs the interpreter's lock.
std::vector<bool> find_trained(std::span<PyObject* const> parameters);
// The current version numbers of the parameters' contents; without numbers during the
// recomputation of a checkpoint. Needs the interpreter's lock.
Contents number_contents(Layer& layer, std::span<PyObject* const> objects,
                         const std::vector<LentParameter>& lent, long long mode, bool reused);
// Makes the module's parameters borrow the memory of `lent` for one call. trained: the parameters'
// requires_grad; null if no backward follows. Needs a LayerLock.
Status lend(Runner& runner, std::vector<LentParameter>& lent, const std::vector<uint64_t>& numbers,
            const std::vector<bool>* trained);
std::vector<DType> dtypes_of(const std::vector<LentParameter>& parameters);

}  // namespace te_fl::python
