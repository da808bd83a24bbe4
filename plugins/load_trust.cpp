#include "plugins/load_trust.hpp"

#include <deque>
#include <set>
#include <vector>

#include "plugins/file_trust.hpp"

namespace te_fl::plugins {
namespace {

constexpr std::size_t kMaxLibraries = 1024;

// A library that the loader would map, and the chain of libraries that need it, the nearest first.
struct Object {
  ElfInfo elf;
  std::vector<Requester> chain;
};

class Closure {
 public:
  explicit Closure(const SearchRules& rules) : rules_(rules) {}

  std::string find_problem(const std::string& path) {
    add(path, {});
    for (; !queue_.empty(); queue_.pop_front()) {
      const Object object = queue_.front();
      for (const auto* names : {&object.elf.needed, &object.elf.filters}) {
        for (const std::string& name : *names) {
          if (std::string problem = look_for(name, object); !problem.empty()) {
            return "it needs " + name + ", and " + problem;
          }
        }
      }
    }
    return {};
  }

 private:
  void add(const std::string& path, const std::vector<Requester>& parents) {
    if (seen_.size() >= kMaxLibraries || !seen_.insert(path).second) return;
    Object object{inspect_elf(path, ElfDepth::kHeaders), {}};
    object.chain = {{path, object.elf.rpath, object.elf.runpath}};
    object.chain.insert(object.chain.end(), parents.begin(), parents.end());
    queue_.push_back(std::move(object));
  }

  std::string look_for(const std::string& name, const Object& object) {
    const FoundLibrary found = find_library(name, object.chain, rules_);
    if (found.loaded) return {};
    for (const std::string& folder : found.run_path_folders) {
      if (std::string problem = folder_problem(folder); !problem.empty()) return problem;
    }
    for (const std::string& file : found.met) {
      if (std::string problem = file_trust_problem(file); !problem.empty()) {
        return "of the file " + file + ": " + problem;
      }
      add(file, object.chain);
    }
    return {};
  }

  // Checks a run path folder and the hwcaps folders below it, which the loader searches first.
  std::string folder_problem(const std::string& folder) {
    if (!judged_.insert(folder).second) return {};
    const std::string which = "its RPATH or RUNPATH leads to " + folder + ": ";
    if (!folder.starts_with('/')) {
      return which +
             "a relative folder, which follows the working directory; link it with "
             "$ORIGIN or an absolute folder";
    }
    std::vector<std::string> folders = hwcaps_folders(folder);
    if (!folders.empty()) folders.push_back(folder + "/glibc-hwcaps");
    folders.push_back(folder);
    for (const std::string& each : folders) {
      if (std::string problem = folder_trust_problem(each); !problem.empty())
        return which + problem;
    }
    return {};
  }

  const SearchRules& rules_;
  std::deque<Object> queue_;
  std::set<std::string> seen_, judged_;
};

}  // namespace

std::string load_trust_problem(const std::string& path, const SearchRules& rules) {
  return Closure(rules).find_problem(path);
}

}  // namespace te_fl::plugins
