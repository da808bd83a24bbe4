#pragma once

namespace te_fl::registry {

// Writes environment::remarks() as warnings, each once in a process. For when plugins have had
// their chance to declare settings.
void log_remarks();

}  // namespace te_fl::registry
