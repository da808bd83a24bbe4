#include "plugins/builtins.hpp"

#if defined(TE_FL_HAVE_REFERENCE)
extern "C" const te_fl_plugin_header* te_fl_reference_query(const te_fl_host_info* host);
#endif
#if defined(TE_FL_HAVE_CPU)
extern "C" const te_fl_plugin_header* te_fl_cpu_query(const te_fl_host_info* host);
#endif

namespace te_fl::plugins {

std::span<const Builtin> builtins() {
  static constexpr Builtin kBuiltins[] = {
#if defined(TE_FL_HAVE_REFERENCE)
    {"reference", &te_fl_reference_query},
#endif
#if defined(TE_FL_HAVE_CPU)
    {"cpu", &te_fl_cpu_query},
#endif
    {nullptr, nullptr},  // a terminator, since an array may not be empty
  };
  return std::span(kBuiltins).first(std::size(kBuiltins) - 1);
}

}  // namespace te_fl::plugins
