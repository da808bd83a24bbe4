// The files of a new plugin project. In their text @NAME@ is replaced by the backend's name, @ABI@
// by the plugin ABI and @VERSION@ by te-fl's version; the other marks depend on whether the project
// has a device, and whether it is for PyTorch too.
#pragma once

#include <span>

namespace te_fl_tool {

struct ProjectFile {
  const char* path;  // path below the project's folder; @NAME@ is replaced in it too
  const char* text;
  bool program = false;      // executable
  bool device_only = false;  // only in projects with a device
};
struct Mark {
  const char* mark;
  const char* text;  // may contain the marks that all projects share
};
std::span<const ProjectFile> project_files();
// The files that make the project's device one of PyTorch's, for --pytorch.
std::span<const ProjectFile> pytorch_files();
std::span<const Mark> project_marks(bool device);
std::span<const Mark> pytorch_marks(bool pytorch);

}  // namespace te_fl_tool
