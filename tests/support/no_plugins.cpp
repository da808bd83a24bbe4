// Linked into every test program, so that tests do not depend on the plugins next to libte_fl in
// the build tree. A test that needs manifests sets TE_FL_PLUGIN_PATH itself.
#include <cstdlib>

namespace {
[[gnu::constructor]] void look_for_no_manifests() { setenv("TE_FL_PLUGIN_PATH", "", 0); }
}  // namespace
