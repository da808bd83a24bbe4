#include "plugins/builtins.hpp"

#include "te_fl/log.hpp"

#if defined(TE_FL_HAVE_REFERENCE)
extern "C" const te_fl_plugin_header* te_fl_reference_query(const te_fl_host_info* host);
#endif
#if defined(TE_FL_HAVE_CPU)
extern "C" const te_fl_plugin_header* te_fl_cpu_query(const te_fl_host_info* host);
#endif

namespace te_fl::registry {

std::span<const Builtin> builtins() {
  static constexpr Builtin kBuiltins[] = {
#if defined(TE_FL_HAVE_REFERENCE)
    {"reference", &te_fl_reference_query},
#endif
#if defined(TE_FL_HAVE_CPU)
    {"cpu", &te_fl_cpu_query},
#endif
    {nullptr, nullptr},  // an array is never empty
  };
  return std::span(kBuiltins).first(std::size(kBuiltins) - 1);
}

std::vector<std::shared_ptr<plugins::Instance>> activate_builtins(OpRegistry& registry) {
  std::vector<std::shared_ptr<plugins::Instance>> active;
  for (const Builtin& builtin : builtins()) {
    auto instance = plugins::activate(builtin.query, registry);
    if (instance.ok()) {
      active.push_back(std::move(instance).value());
    } else {
      log::error("built-in backend " + std::string(builtin.name) + ": " +
                 instance.status().to_string());
    }
  }
  return active;
}

}  // namespace te_fl::registry
