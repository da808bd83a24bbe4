// Part of every test program: what is tested does not depend on the plugins that lie beside
// libte_fl in the build tree. A test that wants manifests sets TE_FL_PLUGIN_PATH itself.
#include <cstdlib>

namespace {
[[gnu::constructor]] void look_for_no_manifests() { setenv("TE_FL_PLUGIN_PATH", "", 0); }
}  // namespace
