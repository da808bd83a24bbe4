#include "gemm_choice_file.hpp"

#include <istream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace te_fl::cuda {

using nlohmann::json;

std::vector<GemmChoice> parse_gemm_choices(std::istream& in) {
  const json root = json::parse(in);
  if (root.at("format") != 1) throw std::runtime_error("\"format\" is not 1");
  std::vector<GemmChoice> result;
  for (const json& entry : root.at("choices")) {
    GemmChoice c;
    c.device = entry.at("device");
    c.problem = entry.at("problem");
    c.library = entry.at("cublaslt");
    const auto words = entry.at("algorithm").get<std::vector<uint64_t>>();
    if (words.size() != c.algorithm.size()) {
      throw std::runtime_error("\"algorithm\" of " + c.problem + " has " +
                               std::to_string(words.size()) + " numbers; it must have " +
                               std::to_string(c.algorithm.size()));
    }
    std::copy(words.begin(), words.end(), c.algorithm.begin());
    c.config = entry.value("config", "");
    c.us = entry.value("us", 0.0);
    c.first_us = entry.value("heuristic_us", 0.0);
    c.candidates = entry.value("candidates", 0);
    c.different = entry.value("different", 0);
    result.push_back(std::move(c));
  }
  return result;
}

std::string gemm_choices_text(const std::vector<GemmChoice>& choices) {
  json list = json::array();
  for (const GemmChoice& c : choices) {
    list.push_back({{"device", c.device},
                    {"problem", c.problem},
                    {"cublaslt", c.library},
                    {"config", c.config},
                    {"us", c.us},
                    {"heuristic_us", c.first_us},
                    {"candidates", c.candidates},
                    {"different", c.different},
                    {"algorithm", c.algorithm}});
  }
  return json{{"format", 1}, {"choices", list}}.dump(1) + "\n";
}

}  // namespace te_fl::cuda
