#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace te_fl_tool {

enum class Color { kNone, kGreen, kRed, kYellow, kBold, kDim };

// Colours the text if standard output is a terminal and NO_COLOR is not set.
std::string paint(Color color, const std::string& text);

// Columns as wide as their widest cell; the last is not padded. Cells may be painted.
class Table {
 public:
  explicit Table(std::vector<std::string> header) { rows_.push_back(std::move(header)); }
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  void print() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// The text of a value that te-fl prints as JSON, or that a parent and a child of check exchange;
// `indent` -1: in one line. Paths, variables and a plugin's words may be any bytes: those that are
// not UTF-8, which JSON has to be, become U+FFFD. Not for files that are read back under the names
// in them.
std::string json_text(const nlohmann::json& value, int indent = 2);

// "te-fl: text" to standard error.
void complain(const std::string& text);

}  // namespace te_fl_tool
