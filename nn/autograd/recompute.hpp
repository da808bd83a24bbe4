#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "te_fl/nn/autograd/recompute.hpp"
#include "te_fl/nn/modules/module.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/tensor.hpp"

// What modules ask of a RecomputeScope. The first run of a piece writes a log of what its forwards
// used, the second reads it in the same order, so each of these is called in both runs alike.
namespace te_fl::nn::detail {

class Fp8State;

// Whether the thread's forwards repeat a first run.
bool replaying() noexcept;
// Whether they have to note what they use.
bool noting() noexcept;

// Of a site's forward state, when a forward begins to use it. replay_scales(): the copy of its
// scales that the first run made is in force from now on (replayed_scale()). note_scales() copies
// them.
Status replay_scales(const Fp8State& state);
Status note_scales(const Fp8State& state);
// F32 [1], the scale in force of the state's slot; undefined if it is the state's own.
Result<Tensor> replayed_scale(const Fp8State& state, int64_t slot);

// Random numbers: the first run's `options.rng` of a draw of `count`, or that it was made.
Status replay_draw(int64_t count, const Device& device, CallOptions& options);
Status note_draw(int64_t count, const Device& device, const CallOptions& options);

// The weight that a linear map's first run read if its module keeps it, else undefined: it is made
// again then.
Result<Tensor> replay_weight(const void* owner, const Device& device);
Status note_weight(const void* owner, const Device& device, const Tensor& kept);

// In both runs, before a forward reads the parameter (null: none): FAILED_PRECONDITION if it was
// written between them.
Status same_parameter(const Parameter* parameter);

}  // namespace te_fl::nn::detail
