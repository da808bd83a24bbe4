// The tuples that te_fl.pytorch passes to te_fl._native to run a layer. te_fl._native and the
// autograd node (node.cpp), which is compiled on the user's machine, both include this file.
#pragma once

namespace te_fl::layer_call {

// The fields of call.py's LayerCall, which documents them. te_fl._native exports the names as
// LAYER_CALL, with which call.py compares its own.
#define TE_FL_LAYER_CALL(X)      \
  X(kLayer, "layer")             \
  X(kInputs, "inputs")           \
  X(kExtras, "extras")           \
  X(kActivation, "activation")   \
  X(kFirst, "first")             \
  X(kAttention, "attention")     \
  X(kRandom, "random")           \
  X(kAccumulates, "accumulates") \
  X(kDelays, "delays")
#define TE_FL_PLACE(place, name) place,
#define TE_FL_NAME(place, name) name,
enum Field { TE_FL_LAYER_CALL(TE_FL_PLACE) kFields };
inline constexpr const char* field_names[] = {TE_FL_LAYER_CALL(TE_FL_NAME)};
#undef TE_FL_PLACE
#undef TE_FL_NAME
#undef TE_FL_LAYER_CALL

// The arguments of layer_forward() and layer_backward() in order; python/src/torch/layer.hpp
// documents them. The last place is that of the first of several tensors.
struct ForwardArgument {
  enum Place { kCall, kTraining, kTensors };
};
struct BackwardArgument {
  enum Place { kToken, kGradient, kMainGrads, kKeep, kInputGrad, kParameters };
};

}  // namespace te_fl::layer_call
