#include "commands.hpp"
namespace te_fl_tool {
int new_backend(const NewBackendOptions&) { return kProblem; }
}  // namespace te_fl_tool
