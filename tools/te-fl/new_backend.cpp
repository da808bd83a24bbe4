// te-fl new-backend: writes a plugin project that builds against an installed te-fl.
#include "new_backend.hpp"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <vector>

#include "commands.hpp"
#include "conformance/check/output.hpp"
#include "te_fl/plugin.h"
#include "te_fl/version.hpp"

namespace te_fl_tool {
namespace {

namespace fs = std::filesystem;

constexpr size_t kLongestName = 40;

// Returns what is wrong with the name, or "".
std::string find_name_problem(const std::string& name) {
  const auto letter = [](char c) { return c >= 'a' && c <= 'z'; };
  bool good = !name.empty() && letter(name[0]) && name.size() <= kLongestName;
  for (const char c : name) good = good && (letter(c) || (c >= '0' && c <= '9') || c == '_');
  if (!good) {
    return "the name '" + name + "' must be a lower case letter, then letters, digits or _, " +
           std::to_string(kLongestName) + " in all at most, such as acme";
  }
  for (const char* taken : {"reference", "cpu", "cuda", "opencl", "null", "te_fl"})
    if (name == taken)
      return "the name '" + name + "' is taken by te-fl; choose your own, such as your company's";
  return {};
}

std::string filled(std::string text, const NewBackendOptions& options) {
  const std::string abi = std::to_string(TE_FL_ABI_MAJOR) + "." + std::to_string(TE_FL_ABI_MINOR);
  std::vector<std::pair<std::string, std::string>> values;
  for (const Mark& m : project_marks(options.device)) values.emplace_back(m.mark, m.text);
  for (const Mark& m : pytorch_marks(options.pytorch)) values.emplace_back(m.mark, m.text);
  values.insert(values.end(), {{"@NAME@", options.name},
                               {"@ABI@", abi},
                               {"@VERSION@", TE_FL_VERSION},
                               {"@PREFIX@", own_prefix()}});
  for (const auto& [mark, value] : values)
    for (size_t at; (at = text.find(mark)) != std::string::npos;)
      text.replace(at, mark.size(), value);
  return text;
}

std::vector<ProjectFile> list_files(const NewBackendOptions& options) {
  std::vector<ProjectFile> files;
  for (const ProjectFile& file : project_files())
    if (options.device || !file.device_only) files.push_back(file);
  if (options.pytorch) {
    const auto more = pytorch_files();
    files.insert(files.end(), more.begin(), more.end());
  }
  return files;
}

// Throws fs::filesystem_error.
void write_project(const fs::path& folder, const NewBackendOptions& options) {
  for (const ProjectFile& file : list_files(options)) {
    const fs::path path = folder / filled(file.path, options);
    fs::create_directories(path.parent_path());
    std::ofstream out(path);
    out << filled(file.text, options);
    out.close();
    if (!out)
      throw fs::filesystem_error("cannot write", path,
                                 std::error_code(errno, std::generic_category()));
    if (file.program)
      fs::permissions(path, fs::perms::owner_exec | fs::perms::group_exec | fs::perms::others_exec,
                      fs::perm_options::add);
  }
}

}  // namespace

int new_backend(const NewBackendOptions& options) {
  if (const std::string problem = find_name_problem(options.name); !problem.empty()) {
    complain(problem);
    return kUsage;
  }
  if (options.pytorch && !options.device) {
    complain("--pytorch makes the project's device one of PyTorch's; give --device too");
    return kUsage;
  }
  const fs::path folder = options.folder;
  std::error_code ignored;
  if (fs::exists(fs::symlink_status(folder, ignored))) {
    complain("'" + options.folder +
             "' exists already, and nothing in it is overwritten; name a folder "
             "that does not exist");
    return kUsage;
  }
  try {
    write_project(folder, options);
  } catch (const fs::filesystem_error& e) {
    fs::remove_all(folder, ignored);
    complain("the project was not written: " + std::string(e.what()));
    return kProblem;
  }
  std::printf("wrote the backend '%s' to %s\n\n", options.name.c_str(), options.folder.c_str());
  for (const ProjectFile& file : list_files(options))
    std::printf("  %s\n", filled(file.path, options).c_str());
  std::printf("\nBuild and certify it:\n  cd %s && ./ci.sh\n", options.folder.c_str());
  if (options.pytorch) {
    std::printf(
        "Then build its device in PyTorch and train a layer there (PYTHON: an interpreter with "
        "PyTorch and te_fl):\n  PYTHON=python3 ./pytorch.sh\n");
  }
  return kSuccess;
}

}  // namespace te_fl_tool
