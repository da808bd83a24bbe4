// The order of the arguments of layer_forward() and layer_backward(). te_fl._native exports these
// lists as tuples of names, LAYER_FORWARD_ARGUMENTS and LAYER_BACKWARD_ARGUMENTS, so that callers
// can check their own order.
#pragma once

#define TE_FL_LAYER_FORWARD_ARGUMENTS(X) \
  X(kLayer, "layer")                     \
  X(kActivation, "activation")           \
  X(kMode, "mode")                       \
  X(kFirst, "is_first_microbatch")       \
  X(kInputs, "inputs")                   \
  X(kParameters, "parameters")           \
  X(kAttention, "attention")             \
  X(kRandom, "random")
#define TE_FL_LAYER_BACKWARD_ARGUMENTS(X) \
  X(kToken, "token")                      \
  X(kGradient, "gradient")                \
  X(kParameters, "parameters")            \
  X(kMainGrads, "main_grads")             \
  X(kKeep, "keep")                        \
  X(kInputGrad, "input_grad")

namespace te_fl::python {

#define TE_FL_PLACE(place, name) place,
#define TE_FL_NAME(place, name) name,
// Indices and names of layer_forward()'s arguments.
struct ForwardArgument {
  enum Place { TE_FL_LAYER_FORWARD_ARGUMENTS(TE_FL_PLACE) kCount };
  static constexpr const char* names[] = {TE_FL_LAYER_FORWARD_ARGUMENTS(TE_FL_NAME)};
};
// Indices and names of layer_backward()'s arguments.
struct BackwardArgument {
  enum Place { TE_FL_LAYER_BACKWARD_ARGUMENTS(TE_FL_PLACE) kCount };
  static constexpr const char* names[] = {TE_FL_LAYER_BACKWARD_ARGUMENTS(TE_FL_NAME)};
};
#undef TE_FL_PLACE
#undef TE_FL_NAME

}  // namespace te_fl::python
