#include "conformance/check/output.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

namespace te_fl_tool {
namespace {

bool use_color() {
  static const bool use = isatty(STDOUT_FILENO) != 0 && std::getenv("NO_COLOR") == nullptr;
  return use;
}

// The visible width of a cell: counts UTF-8 characters outside of escape sequences.
size_t width(const std::string& cell) {
  size_t n = 0;
  for (size_t i = 0; i < cell.size(); ++i) {
    if (cell[i] == '\033') {
      while (i < cell.size() && cell[i] != 'm') ++i;
    } else if ((static_cast<unsigned char>(cell[i]) & 0xc0) != 0x80) {
      ++n;
    }
  }
  return n;
}

}  // namespace

std::string paint(Color color, const std::string& text) {
  static const char* const codes[] = {"", "32", "31", "33", "1", "2"};
  if (color == Color::kNone || !use_color()) return text;
  return std::string("\033[") + codes[static_cast<int>(color)] + "m" + text + "\033[0m";
}

void Table::print() const {
  std::vector<size_t> widths;
  for (const auto& row : rows_) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], width(row[c]));
  }
  for (size_t r = 0; r < rows_.size(); ++r) {
    std::string line = " ";
    for (size_t c = 0; c < rows_[r].size(); ++c) {
      const std::string& cell = rows_[r][c];
      line += " " + (r == 0 ? paint(Color::kBold, cell) : cell);
      if (c + 1 < rows_[r].size()) line += std::string(widths[c] - width(cell) + 1, ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    std::printf("%s\n", line.c_str());
  }
}

std::string json_text(const nlohmann::json& value, int indent) {
  return value.dump(indent, ' ', false, nlohmann::json::error_handler_t::replace);
}

void complain(const std::string& text) { std::fprintf(stderr, "te-fl: %s\n", text.c_str()); }

}  // namespace te_fl_tool
