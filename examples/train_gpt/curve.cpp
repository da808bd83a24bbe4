#include "curve.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

namespace train_gpt {
namespace {

struct Range {
  double low, high;
};

Range find_range(const std::vector<double>& values, double held_out) {
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  Range r{std::min(*low, held_out), std::max(*high, held_out)};
  if (r.high - r.low < 1e-3) r.high = r.low + 1e-3;
  return r;
}

std::string format(const char* pattern, double value) {
  char text[64];
  std::snprintf(text, sizeof text, pattern, value);
  return text;
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else {
      out += c;
    }
  }
  return out;
}

// The plot area within the document of 720 by 400.
constexpr double kLeft = 60, kRight = 700, kTop = 50, kBottom = 350;

// Returns the step between grid lines: 1, 2 or 5 times a power of ten, about five steps per range.
double grid_step(double span) {
  const double rough = span / 5;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough) return factor * power;
  }
  return 10 * power;
}

std::string text_at(double x, double y, const char* anchor, const std::string& text) {
  return "<text x=\"" + format("%.1f", x) + "\" y=\"" + format("%.1f", y) + "\" text-anchor=\"" +
         anchor + "\">" + escaped(text) + "</text>\n";
}

std::string line_at(const char* kind, double x1, double y1, double x2, double y2) {
  return std::string("<path class=\"") + kind + "\" d=\"M" + format("%.1f", x1) + " " +
         format("%.1f", y1) + "L" + format("%.1f", x2) + " " + format("%.1f", y2) + "\"/>\n";
}

constexpr const char* kStyle =
    "<style>\n"
    "svg { background: #ffffff; font: 14px \"DejaVu Sans\", sans-serif }\n"
    "text { fill: #1f2328 }\n"
    "path { fill: none }\n"
    ".grid { stroke: #d0d7de }\n"
    ".training { stroke: #0969da; stroke-width: 2 }\n"
    ".held-out { stroke: #bc4c00; stroke-width: 2; stroke-dasharray: 6 4 }\n"
    "@media (prefers-color-scheme: dark) {\n"
    "svg { background: #0d1117 } text { fill: #e6edf3 } .grid { stroke: #30363d }\n"
    ".training { stroke: #58a6ff } .held-out { stroke: #f0883e }\n"
    "}\n"
    "</style>\n";

double y_at(const Range& range, double loss) {
  return kBottom - (loss - range.low) / (range.high - range.low) * (kBottom - kTop);
}

// Draws grid lines, labelled with losses at the side and with steps below.
std::string axes(const Range& range, double steps) {
  std::string out;
  const double step = grid_step(range.high - range.low);
  for (double at = std::ceil(range.low / step) * step; at <= range.high + 1e-9; at += step) {
    out += line_at("grid", kLeft, y_at(range, at), kRight, y_at(range, at));
    out += text_at(kLeft - 6, y_at(range, at) + 5, "end", format(step < 0.1 ? "%.3f" : "%.1f", at));
  }
  for (int quarter = 0; quarter <= 4; ++quarter) {
    const double x = kLeft + (kRight - kLeft) * quarter / 4;
    out += text_at(x, kBottom + 20, quarter == 4 ? "end" : "middle",
                   format("%.0f", steps * quarter / 4));
  }
  out += text_at((kLeft + kRight) / 2, kBottom + 42, "middle", "steps");
  return out;
}

}  // namespace

std::vector<double> averaged(const std::vector<double>& values, size_t count) {
  std::vector<double> means;
  const size_t bins = std::min(count, values.size());
  for (size_t i = 0; i < bins; ++i) {
    const auto begin = values.begin() + static_cast<ptrdiff_t>(i * values.size() / bins);
    const auto end = values.begin() + static_cast<ptrdiff_t>((i + 1) * values.size() / bins);
    means.push_back(std::accumulate(begin, end, 0.0) / static_cast<double>(end - begin));
  }
  return means;
}

std::string chart(const Curve& curve) {
  constexpr size_t kColumns = 60, kRows = 12;
  const std::vector<double> means = averaged(curve.training, kColumns);
  if (means.empty()) return {};
  const Range y = find_range(means, curve.held_out);
  const auto row = [&](double loss) {
    return static_cast<size_t>(std::lround((y.high - loss) / (y.high - y.low) * (kRows - 1)));
  };
  std::vector<std::string> lines(kRows, std::string(means.size() + 1, ' '));
  for (size_t i = 0; i < means.size(); ++i) lines[row(means[i])][i] = '*';
  lines[row(curve.held_out)][means.size()] = 'o';
  std::string out = "Loss, nats/byte: * training, o held out at the end\n";
  for (size_t r = 0; r < kRows; ++r) {
    const double loss = y.high - (y.high - y.low) * static_cast<double>(r) / (kRows - 1);
    out += format("%8.2f |", loss) + lines[r].substr(0, lines[r].find_last_not_of(' ') + 1) + "\n";
  }
  const std::string steps = std::to_string(curve.training.size());
  const size_t gap = means.size() > steps.size() ? means.size() - steps.size() : 1;
  return out + "         +" + std::string(means.size() + 1, '-') + "\n          1" +
         std::string(gap, ' ') + steps + " steps\n";
}

std::string svg(const Curve& curve) {
  const std::vector<double> means = averaged(curve.training, 320);
  const std::vector<double> shown = means.empty() ? std::vector<double>{curve.held_out} : means;
  const Range range = find_range(shown, curve.held_out);
  const double steps = static_cast<double>(std::max<size_t>(curve.training.size(), 1));
  std::string out =
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 720 400\" role=\"img\">\n"
      "<title>" +
      escaped(curve.title) + "</title>\n" + std::string(kStyle);
  out += text_at(kLeft, 24, "start", curve.title);
  out += axes(range, steps);
  std::string path;
  for (size_t i = 0; i < means.size(); ++i) {
    const double x = kLeft + (kRight - kLeft) * (static_cast<double>(i) + 0.5) /
                                 static_cast<double>(means.size());
    path += (i == 0 ? "M" : "L") + format("%.1f", x) + " " + format("%.1f", y_at(range, means[i]));
  }
  if (!path.empty()) out += "<path class=\"training\" d=\"" + path + "\"/>\n";
  out +=
      line_at("held-out", kLeft, y_at(range, curve.held_out), kRight, y_at(range, curve.held_out));
  out += text_at(
      kRight, kTop - 6, "end",
      "training (line), held out at the end (dashes): " + format("%.3f nats/byte", curve.held_out));
  return out + "</svg>\n";
}

}  // namespace train_gpt
