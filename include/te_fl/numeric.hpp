// The arithmetic that every backend must agree on, bit for bit: element formats, scaling rules and
// the dropout random stream. Header-only, standard library only, so a backend that sees nothing but
// include/te_fl can use it.
//
// Everything here is a pure function of its arguments (delayed_scaling_update also writes the
// history it is given): thread-safe, no allocation, no exceptions. Conversions work on bit patterns
// and therefore give the same result under -ffast-math, FMA contraction and flush-to-zero; the
// scaling rules need IEEE FP32 division and must not be compiled with -ffast-math.
#pragma once

#include "te_fl/numeric/formats.hpp"
#include "te_fl/numeric/philox.hpp"
#include "te_fl/numeric/scaling.hpp"
