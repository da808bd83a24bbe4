// The files of a plugin project. In their text @NAME@ stands for the backend's name, @ABI@ for the
// plugin ABI and @VERSION@ for te-fl's; the other marks depend on whether it has a device.
#pragma once

#include <span>

namespace te_fl_tool {

struct ProjectFile {
  const char* path;  // below the project's folder; @NAME@ in it is replaced too
  const char* text;
  bool program = false;      // may be executed
  bool device_only = false;  // belongs to a project with a device
};
struct Mark {
  const char* mark;
  const char* text;  // may contain the marks that all projects have
};
std::span<const ProjectFile> project_files();
std::span<const Mark> project_marks(bool device);

}  // namespace te_fl_tool
