// The files of a plugin project. In their text @NAME@ stands for the backend's name, @ABI@ for the
// plugin ABI and @VERSION@ for te-fl's.
#pragma once

#include <span>

namespace te_fl_tool {

struct ProjectFile {
  const char* path;  // below the project's folder; @NAME@ in it is replaced too
  const char* text;
  bool program = false;  // may be executed
};
std::span<const ProjectFile> project_files();

}  // namespace te_fl_tool
