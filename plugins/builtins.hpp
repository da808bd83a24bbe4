#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "plugins/activate.hpp"
#include "te_fl/op_registry.hpp"

namespace te_fl::registry {

// A backend that is part of libte_fl.
struct Builtin {
  const char* name;
  te_fl_plugin_query_fn query;
};

// Those compiled in, in the order in which they are activated.
std::span<const Builtin> builtins();

// Activates the built-in backends like any plugin. One that fails is logged and left out.
std::vector<std::shared_ptr<plugins::Instance>> activate_builtins(OpRegistry& registry);

}  // namespace te_fl::registry
