// Decides whether code at a path may be executed, by checking which users could change what the
// path leads to.
//
// A path is followed from the root like the kernel does, through each folder and symbolic link.
// Each of them must be owned by root or by the effective user of this process and must not be
// writable by other users. A folder with the sticky bit (such as /tmp) passes if the next component
// exists and has one of these two owners, since other users can then add names but not replace that
// one. Write access of a group counts as that of other users, except for the user's private group,
// which has no other member. After a path has passed, no other user can change what opening it
// again finds.
//
// Each function returns an empty text, or a sentence that names the writable component, who may
// write it, and the command that corrects this. Thread-safe.
#pragma once

#include <string>

namespace te_fl::plugins {

// True if the process has more rights than the user who started it (set-user-ID, set-group-ID or
// file capabilities). It must then follow no path that the user controls.
bool privileges_elevated();

// Checks a file. For a missing file, checks the folders of its path that exist.
std::string file_trust_problem(const std::string& path);

// Checks a folder that the dynamic loader searches. Other users must not be able to add a name, so
// the sticky bit does not help; nor to create the folder if it is missing.
std::string folder_trust_problem(const std::string& path);

}  // namespace te_fl::plugins
