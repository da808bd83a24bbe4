#pragma once

namespace te_fl::registry {

// Logs at the process's end who served what, if DEBUG messages are written then.
void summarise_at_exit();

}  // namespace te_fl::registry
