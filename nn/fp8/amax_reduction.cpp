#include "te_fl/nn/fp8/amax_reduction.hpp"

#include <utility>

#include "nn/fp8/pending_updates.hpp"

namespace te_fl::nn {

AmaxReduction::AmaxReduction(Reduce reduce)
    : reduce_(std::move(reduce)), sites_(std::make_unique<detail::ReducedSites>()) {}
AmaxReduction::~AmaxReduction() = default;

}  // namespace te_fl::nn
