#pragma once

#include <string>

namespace te_fl::dispatch {

// The command line that runs a saved call again. It names the plugin of `owner` if te-fl would not
// find that plugin by itself.
std::string replay_command(const std::string& owner, const std::string& file);

}  // namespace te_fl::dispatch
