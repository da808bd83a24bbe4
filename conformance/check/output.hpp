#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace te_fl_tool {

enum class Color { kNone, kGreen, kRed, kYellow, kBold, kDim };

// Colours the text if standard output is a terminal and NO_COLOR is not set.
std::string paint(Color color, const std::string& text);

// A text table. Columns are as wide as their widest cell, and the last column is not padded. Cells
// may contain colours.
class Table {
 public:
  explicit Table(std::vector<std::string> header) { rows_.push_back(std::move(header)); }
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  void print() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// Formats JSON for output, or for the exchange between a parent and a child of te-fl check.
// `indent` -1: one line. Bytes that are not UTF-8, as in paths, variables or a plugin's texts,
// become U+FFFD, since JSON must be UTF-8. Do not use it for files whose names are looked up again
// after reading.
std::string json_text(const nlohmann::json& value, int indent = 2);

// Writes "te-fl: text" to standard error.
void complain(const std::string& text);

}  // namespace te_fl_tool
