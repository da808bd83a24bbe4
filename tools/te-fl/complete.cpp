// te-fl __complete WORD...: prints the possible completions of the last word. The shells' scripts
// call it, so they complete every option, op, implementation and device that te-fl knows.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <set>

#include "commands.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl_tool {
namespace {

using Words = std::vector<std::string>;

Words op_names() { return te_fl::OpManager::instance().registry().op_names(); }

// Returns the ids of one op's implementations, or of all.
Words implementations(const std::string& op) {
  std::set<std::string> ids;
  // loads the plugins whose loading was deferred to the use of their devices
  te_fl::plugins::list();
  for (const auto& impl : te_fl::OpManager::instance().registry().snapshot()) {
    if (op.empty() || impl.op == op) ids.insert(impl.impl_id);
  }
  return {ids.begin(), ids.end()};
}

Words device_names() {
  Words names;
  for (const te_fl::Device& d : te_fl::devices::list()) names.push_back(te_fl::to_string(d));
  return names;
}

template <class T>
Words list_names(int count) {
  Words names;
  for (int i = 0; i < count; ++i) names.emplace_back(te_fl::name(static_cast<T>(i)));
  return names;
}

Words settings() {
  Words names;
  for (const auto& v : te_fl::environment::table()) names.push_back(v.name + "=");
  return names;
}

// The values that an option or a positional argument accepts. Arguments with values that cannot be
// listed have no entry.
struct Values {
  std::function<Words(const std::string& op)> list;
  bool several = false;  // a list separated by commas
};

const std::map<std::string, Values>& values_by_name() {
  static const std::map<std::string, Values> known = {
      {"op", {[](const std::string&) { return op_names(); }}},
      {"name", {[](const std::string&) { return op_names(); }}},
      {"impl", {implementations, true}},
      {"device", {[](const std::string&) { return device_names(); }}},
      {"dtype",
       {[](const std::string&) { return list_names<te_fl::DType>(TE_FL_DTYPE_COUNT); }, true}},
      {"scaling",
       {[](const std::string&) { return list_names<te_fl::Scaling>(TE_FL_SCALING_COUNT); }, true}},
      {"set", {[](const std::string&) { return settings(); }}},
      {"builtin", {[](const std::string&) {
         return Words{"cpu", "reference"};
       }}},
      {"shell", {[](const std::string&) {
         return Words{"bash", "zsh", "fish"};
       }}},
  };
  return known;
}

const std::set<std::string> kTakesFiles = {"file", "files", "a",     "b",   "plugin",
                                           "out",  "json",  "junit", "html"};

// Returns an option's name as values_by_name() and kTakesFiles use it: "impl" for --impl.
std::string plain_name(const CLI::Option& option) {
  return option.get_lnames().empty() ? option.get_name() : option.get_lnames().front();
}

class Completion {
 public:
  Completion(CLI::App& app, Words words) : app_(&app), words_(std::move(words)) {
    if (words_.empty()) words_.emplace_back();
    current_ = words_.back();
    words_.pop_back();
  }

  void print() {
    descend();
    find();
    std::printf("%s\n", kind_);
    for (const std::string& word : found_) std::printf("%s\n", word.c_str());
  }

 private:
  CLI::App* subcommand(const std::string& word) const {
    for (CLI::App* sub : app_->get_subcommands({})) {
      if (sub->get_name() == word) return sub;
    }
    return nullptr;
  }

  // Descends into the subcommand that the words before the last one name, and counts its positional
  // arguments.
  void descend() {
    for (const std::string& word : words_) {
      if (CLI::App* sub = subcommand(word)) {
        app_ = sub;
        continue;
      }
      if (waits_ != nullptr) {
        waits_ = nullptr;
      } else if (word.starts_with("-")) {
        const CLI::Option* option = app_->get_option_no_throw(word);
        if (option != nullptr && option->get_items_expected_max() > 0) waits_ = option;
      } else {
        if (positional_ == 0) first_ = word;
        ++positional_;
      }
    }
  }

  void find() {
    if (waits_ != nullptr) return values(plain_name(*waits_));
    if (current_.starts_with("-")) {
      for (const CLI::Option* option : app_->get_options()) {
        for (const std::string& name : option->get_lnames()) {
          if (!option->get_group().empty()) offer("--" + name);
        }
      }
      return;
    }
    for (const CLI::App* sub : app_->get_subcommands({})) {
      if (!sub->get_group().empty()) offer(sub->get_name());
    }
    // the first argument is a new name, which cannot be completed; the second is a folder
    if (app_->get_name() == "new-backend") {
      if (positional_ == 1) kind_ = "folders";
      return;
    }
    size_t place = 0;
    for (const CLI::Option* option : app_->get_options()) {
      if (!option->get_positional()) continue;
      const bool many = option->get_items_expected_max() > 1;
      if (place++ == positional_ || (many && place <= positional_)) values(plain_name(*option));
    }
  }

  void values(const std::string& name) {
    if (kTakesFiles.count(name) != 0) kind_ = "files";
    const auto known = values_by_name().find(name);
    if (known == values_by_name().end()) return;
    // In a comma-separated list only the text after the last comma is completed.
    const size_t comma = known->second.several ? current_.rfind(',') : std::string::npos;
    const std::string before = comma == std::string::npos ? "" : current_.substr(0, comma + 1);
    Words words = known->second.list(first_);
    if (name == "impl" && app_->get_name() == "bench") words.emplace_back("all");
    for (const std::string& word : words) offer(before + word);
  }

  void offer(const std::string& word) {
    if (word.starts_with(current_)) found_.push_back(word);
  }

  CLI::App* app_;
  Words words_, found_;
  std::string current_;
  std::string first_;  // first positional argument: the op, for commands that take one
  const CLI::Option* waits_ = nullptr;
  size_t positional_ = 0;
  const char* kind_ = "words";
};

}  // namespace

int complete(CLI::App& app, std::vector<std::string> words) {
  Completion(app, std::move(words)).print();
  return kSuccess;
}

}  // namespace te_fl_tool
