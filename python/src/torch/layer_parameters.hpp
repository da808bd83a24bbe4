// The framework's parameters as a layer borrows them for one call.
#pragma once

#include <cstdint>
#include <vector>

#include "py/py.hpp"
#include "torch/layer_object.hpp"
#include "torch/lent_parameter.hpp"
#include "torch/recompute.hpp"

namespace te_fl::python {

// The mode of a forward: whether it keeps what a backward needs, and else the number of the scope
// in which quantised weights are kept.
constexpr long long kTraining = 0, kUncached = 1;

// The parameters in the layer's order, under the interpreter's lock; a TypeError for another number
// of them.
std::vector<LentParameter> parameters_of(const Layer& layer, const std::vector<PyObject*>& objects,
                                         bool training);
// For each parameter its requires_grad, under the interpreter's lock.
std::vector<bool> trained_of(const std::vector<PyObject*>& parameters);
// The parameters' contents now, without numbers where a piece is repeated. Under the interpreter's
// lock.
Contents number_contents(Layer& layer, const std::vector<PyObject*>& objects,
                         const std::vector<LentParameter>& lent, long long mode, bool reused);
// Has the module's parameters borrow these for one call. trained: null where the forward trains
// nothing. Under a LayerLock.
Status lend(Runner& runner, std::vector<LentParameter>& lent, const std::vector<uint64_t>& numbers,
            const std::vector<bool>* trained);
std::vector<DType> dtypes_of(const std::vector<LentParameter>& parameters);

}  // namespace te_fl::python
