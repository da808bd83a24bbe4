// Decides if a path may be trusted with code execution, by asking who else could change what it
// leads to.
//
// A path is followed from the root as the kernel does it, through every folder and every symbolic
// link. Each of them must belong to root or to the (effective) user of this process and be writable
// by nobody else, or what it leads to could be exchanged. A folder with the sticky bit (such as
// /tmp) passes where what is taken from it exists and belongs to those two: others can add names
// there but not replace that one. Writing by a group counts as writing by others, except for the
// user's private group, in which nobody else is. Once a path has passed, nobody else can change
// what opening it again would find.
//
// Each function returns an empty text, or a sentence that names what can be written by whom and the
// command that mends it. Thread-safe.
#pragma once

#include <string>

namespace te_fl::plugins {

// True when the process runs with more rights than the user who started it (set-user-ID,
// set-group-ID or file capabilities). Then no path that the user controls may be followed.
bool privileges_elevated();

// Judges a file. One that does not exist is judged by the folders that do.
std::string file_trust_problem(const std::string& path);

// Judges a folder in which the dynamic loader looks for a name: nobody else may add one, so the
// sticky bit does not help, and neither may they create the folder where it does not exist.
std::string folder_trust_problem(const std::string& path);

}  // namespace te_fl::plugins
