// Parses the manifests named on the command line with te-fl's parser and prints the errors of each.
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

#include "plugins/manifest.hpp"

int main(int argc, char** argv) {
  int wrong = 0;
  for (int i = 1; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    const auto result = te_fl::plugins::parse_manifest(text, argv[i]);
    if (result.ok()) continue;
    std::printf("%s\n", result.error.c_str());
    ++wrong;
  }
  return wrong == 0 && argc > 1 ? 0 : 1;
}
