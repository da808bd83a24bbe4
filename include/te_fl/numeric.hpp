// The arithmetic on which every backend must agree bit for bit: element formats, scaling rules and
// the random numbers of dropout. Header-only; needs only the standard library, so that a backend
// can use it with nothing but include/te_fl.
//
// All functions are pure (delayed_scaling_update also writes its `history` argument), thread-safe,
// do not allocate and do not throw. Conversions work on bit patterns and therefore give the same
// result under -ffast-math, FMA contraction and flush-to-zero. The scaling rules need IEEE FP32
// division and must not be compiled with -ffast-math.
#pragma once

#include "te_fl/numeric/formats.hpp"
#include "te_fl/numeric/philox.hpp"
#include "te_fl/numeric/scaling.hpp"
