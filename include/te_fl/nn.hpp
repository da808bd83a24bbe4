#pragma once

// Transformer modules with explicit backward, FP8 autocast and recipes, optimizers, checkpoints.
#include "te_fl/nn/attention.hpp"
#include "te_fl/nn/autocast.hpp"
#include "te_fl/nn/context.hpp"
#include "te_fl/nn/embedding.hpp"
#include "te_fl/nn/graphed_step.hpp"
#include "te_fl/nn/init.hpp"
#include "te_fl/nn/linear.hpp"
#include "te_fl/nn/loss.hpp"
#include "te_fl/nn/mlp.hpp"
#include "te_fl/nn/module.hpp"
#include "te_fl/nn/norm.hpp"
#include "te_fl/nn/optimizer.hpp"
#include "te_fl/nn/recipe.hpp"
#include "te_fl/nn/recompute.hpp"
#include "te_fl/nn/safetensors.hpp"
#include "te_fl/nn/transformer.hpp"
