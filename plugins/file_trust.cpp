#include "plugins/file_trust.hpp"

#include <pwd.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <set>
#include <vector>

namespace te_fl::plugins {
namespace {

namespace fs = std::filesystem;

// `text` as one shell word.
std::string shell_word(const std::string& text) {
  constexpr const char* kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-";
  if (!text.empty() && text.find_first_not_of(kPlain) == text.npos) return text;
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

std::string user_name(uid_t id) {
  char buffer[4096];
  passwd entry{};
  passwd* found = nullptr;
  if (getpwuid_r(id, &entry, buffer, sizeof(buffer), &found) == 0 && found) return entry.pw_name;
  return std::to_string(id);
}

// The path as given and the path with symbolic links resolved, when that is another.
std::vector<fs::path> both_forms(const std::string& path) {
  std::error_code error;
  std::vector<fs::path> out{fs::absolute(path, error)};
  const fs::path real = fs::canonical(path, error);
  if (!error && real != out[0]) out.push_back(real);
  return out;
}

std::string folder_problem(const fs::path& folder) {
  struct stat st {};
  if (::stat(folder.c_str(), &st) != 0 || !(st.st_mode & S_IWOTH) || (st.st_mode & S_ISVTX)) {
    return {};
  }
  return "its folder " + folder.string() +
         " can be written by everybody, who could replace the file; run: chmod o-w " +
         shell_word(folder.string());
}

std::string owner_of(const fs::path& path, const std::string& what) {
  struct stat st {};
  if (::stat(path.c_str(), &st) != 0 || st.st_uid == 0 || st.st_uid == ::geteuid()) return {};
  return what + path.string() + " belongs to " + user_name(st.st_uid) +
         ", and must belong to root or to " + user_name(::geteuid()) + "; run: chown " +
         user_name(::geteuid()) + " " + shell_word(path.string());
}

}  // namespace

bool privileges_elevated() { return getauxval(AT_SECURE) != 0; }

std::string world_writable_problem(const std::string& path) {
  struct stat st {};
  if (::stat(path.c_str(), &st) == 0 && (st.st_mode & S_IWOTH) && !S_ISLNK(st.st_mode)) {
    return "it can be written by everybody; run: chmod o-w " + shell_word(path);
  }
  std::set<fs::path> seen;
  for (const fs::path& form : both_forms(path)) {
    for (fs::path folder = form.parent_path(); seen.insert(folder).second;
         folder = folder.parent_path()) {
      if (std::string problem = folder_problem(folder); !problem.empty()) return problem;
    }
  }
  return {};
}

std::string owner_problem(const std::string& path) {
  for (const fs::path& form : both_forms(path)) {
    if (std::string problem = owner_of(form, "the file "); !problem.empty()) return problem;
    if (std::string problem = owner_of(form.parent_path(), "the folder "); !problem.empty()) {
      return problem;
    }
  }
  return {};
}

std::string file_trust_problem(const std::string& path) {
  std::string problem = world_writable_problem(path);
  return problem.empty() ? owner_problem(path) : problem;
}

}  // namespace te_fl::plugins
