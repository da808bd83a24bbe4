#pragma once

#include <span>

#include "te_fl/plugin.h"

namespace te_fl::plugins {

// A backend that is part of libte_fl.
struct Builtin {
  const char* name;
  te_fl_plugin_query_fn query;
};

// The compiled-in backends, in the order of activation.
std::span<const Builtin> builtins();

}  // namespace te_fl::plugins
