#pragma once

#include <string>

namespace te_fl::dispatch {

// The command line that runs a saved call again: with the plugin of `owner`, where te-fl would not
// find that by itself.
std::string replay_command(const std::string& owner, const std::string& file);

}  // namespace te_fl::dispatch
