#include "plugins/file_trust.hpp"

#include <grp.h>
#include <pwd.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <filesystem>
#include <optional>
#include <string_view>

namespace te_fl::plugins {
namespace {

constexpr int kMaxLinks = 40;  // the kernel's limit

// Quotes `text` as one shell word.
std::string shell_word(const std::string& text) {
  constexpr const char* kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-";
  if (!text.empty() && text.find_first_not_of(kPlain) == text.npos) return text;
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

struct User {
  std::string name;
  std::optional<gid_t> group;  // primary group; nullopt: unknown user
};

User find_user(uid_t id) {
  char buffer[4096];
  passwd entry{};
  passwd* found = nullptr;
  if (getpwuid_r(id, &entry, buffer, sizeof(buffer), &found) == 0 && found != nullptr) {
    return {entry.pw_name, entry.pw_gid};
  }
  return {std::to_string(id), std::nullopt};
}

std::string group_name(gid_t id) {
  char buffer[16384];
  group entry{};
  group* found = nullptr;
  const bool known =
      getgrgid_r(id, &entry, buffer, sizeof(buffer), &found) == 0 && found != nullptr;
  return known ? entry.gr_name : std::to_string(id);
}

// True for the user's private group: the primary group, with the user's name and no other member.
// Many systems give every user such a group and make files group-writable.
bool private_group(gid_t id) {
  const User user = find_user(::geteuid());
  if (user.group != id) return false;
  char buffer[16384];
  group entry{};
  group* found = nullptr;
  if (getgrgid_r(id, &entry, buffer, sizeof(buffer), &found) != 0 || found == nullptr) return false;
  if (user.name != entry.gr_name) return false;
  for (char** member = entry.gr_mem; *member != nullptr; ++member) {
    if (user.name != *member) return false;
  }
  return true;
}

// True if the file has an access control list. The mode's group bits are then the list's mask, not
// the group's rights.
bool has_access_list(const std::string& path) {
  return ::lgetxattr(path.c_str(), "system.posix_acl_access", nullptr, 0) > 0;
}

// The users other than root and this user who may write a file, as text, and the chmod option that
// revokes their right.
struct Writers {
  std::string who, chmod;
};
std::optional<Writers> other_writers(const std::string& path, const struct stat& st) {
  if ((st.st_mode & S_IWOTH) != 0) return Writers{"everybody", "o-w"};
  if ((st.st_mode & S_IWGRP) == 0) return std::nullopt;
  if (has_access_list(path)) return Writers{"those that its access control list names", "g-w"};
  if (private_group(st.st_gid)) return std::nullopt;
  return Writers{"the group " + group_name(st.st_gid), "g-w"};
}

std::string owner_problem(const std::string& what, const std::string& path, const struct stat& st) {
  if (st.st_uid == 0 || st.st_uid == ::geteuid()) return {};
  const std::string me = find_user(::geteuid()).name;
  return "the " + what + " " + path + " belongs to " + find_user(st.st_uid).name +
         ", and must belong to root or to " + me + "; run: chown " +
         (S_ISLNK(st.st_mode) ? "-h " : "") + me + " " + shell_word(path);
}

// Follows one path and stops at the first component that other users can change.
class Walk {
 public:
  explicit Walk(bool folder) : folder_(folder) {}

  std::string find_problem(const std::string& path) {
    std::error_code error;
    const std::filesystem::path absolute = std::filesystem::absolute(path, error);
    if (error) return "the working directory of the relative path " + path + " is gone";
    enqueue(absolute.string());
    if (std::string problem = enter("/"); !problem.empty()) return problem;
    while (!rest_.empty()) {
      const std::string name = rest_.front();
      rest_.pop_front();
      if (std::string problem = step(name); !problem.empty()) return problem;
      if (ended_) return {};
    }
    return folder_ ? sticky_problem("others could add a library to it") : std::string();
  }

 private:
  // Prepends the components of a path, or of a link's target, to those that remain to be followed.
  void enqueue(std::string_view path) {
    std::deque<std::string> parts;
    while (!path.empty()) {
      const size_t end = std::min(path.find('/'), path.size());
      if (end > 0) parts.emplace_back(path.substr(0, end));
      path.remove_prefix(std::min(end + 1, path.size()));
    }
    rest_.insert(rest_.begin(), parts.begin(), parts.end());
  }

  std::string step(const std::string& name) {
    if (name == ".") return {};
    if (name == "..") return enter(at_.substr(0, std::max<size_t>(at_.rfind('/'), 1)));
    const std::string next = (at_ == "/" ? "" : at_) + "/" + name;
    struct stat st {};
    if (::lstat(next.c_str(), &st) != 0) {
      ended_ = true;
      return folder_ ? sticky_problem("others could create " + next + " in it") : std::string();
    }
    if (S_ISDIR(st.st_mode)) return enter(next);
    if (S_ISLNK(st.st_mode)) return follow(next, st);
    ended_ = true;
    if (!rest_.empty()) return {};  // not a folder: the rest does not exist
    if (const auto writers = other_writers(next, st)) {
      return "it can be written by " + writers->who + "; run: chmod " + writers->chmod + " " +
             shell_word(next);
    }
    return owner_problem("file", next, st);
  }

  std::string follow(const std::string& link, const struct stat& st) {
    if (std::string problem = owner_problem("link", link, st); !problem.empty()) return problem;
    if (++links_ > kMaxLinks)
      return "its path has more than 40 symbolic links, or a circle of them";
    std::error_code error;
    const std::string target = std::filesystem::read_symlink(link, error).string();
    if (error) return "the link " + link + " cannot be read: " + error.message();
    enqueue(target);
    return target.starts_with('/') ? enter("/") : std::string();
  }

  std::string enter(const std::string& folder) {
    struct stat st {};
    at_ = folder.empty() ? "/" : folder;
    sticky_.reset();
    if (::lstat(at_.c_str(), &st) != 0) return {};  // removed meanwhile; open() will report it
    if (const auto writers = other_writers(at_, st)) {
      if ((st.st_mode & S_ISVTX) == 0) return writable_problem(*writers, "replace the file");
      sticky_ = writers;
    }
    return owner_problem("folder", at_, st);
  }

  std::string writable_problem(const Writers& writers, const std::string& consequence) const {
    return "its folder " + at_ + " can be written by " + writers.who + ", who could " +
           consequence + "; run: chmod " + writers.chmod + " " + shell_word(at_);
  }

  std::string sticky_problem(const std::string& consequence) const {
    if (!sticky_) return {};
    return "the folder " + at_ + " can be written by " + sticky_->who + ", so that " + consequence;
  }

  const bool folder_;
  std::deque<std::string> rest_;
  std::string at_;                 // the resolved folder so far, without links
  std::optional<Writers> sticky_;  // users who may add names to it but not replace any
  int links_ = 0;
  bool ended_ = false;  // reached a file or a missing name
};

}  // namespace

bool privileges_elevated() { return getauxval(AT_SECURE) != 0; }

std::string file_trust_problem(const std::string& path) { return Walk(false).find_problem(path); }

std::string folder_trust_problem(const std::string& path) { return Walk(true).find_problem(path); }

}  // namespace te_fl::plugins
