#pragma once

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

// "te-fl: text" to standard error.
void complain(const std::string& text);

}  // namespace te_fl_tool
