// Whether a file may be trusted with code execution: who else could have written it.
#pragma once

#include <string>
#include <string_view>

namespace te_fl::plugins {

// True when the process runs with more rights than the user who started it (set-user-ID,
// set-group-ID or file capabilities). Then no path that the user controls may be followed.
bool privileges_elevated();
// Replaces a file whole, by atomic rename; false: it is as it was, and errno says why.
bool replace_file(const std::string& name, std::string_view text);

// Empty when neither the file nor a folder that holds it can be written by everybody. Otherwise a
// sentence that names what can be, and the chmod line that mends it. A folder with the sticky bit
// (such as /tmp) passes: others can add files there but not replace this one. All folders up to the
// root count, both of the path as given and of what symbolic links lead to. A file that does not
// exist is judged by its folders.
std::string world_writable_problem(const std::string& path);

// Empty when the file and the folder that holds it belong to root or to the current (effective)
// user. Otherwise a sentence with the owner and the chown line that mends it.
std::string owner_problem(const std::string& path);

// Both, the first that applies.
std::string file_trust_problem(const std::string& path);

}  // namespace te_fl::plugins
