// Prints the plugins that a new process finds in its environment, then makes one relu call and
// prints the implementation that ran it.
#include <cstdio>
#include <cstring>

#include "te_fl/te_fl.hpp"

int main(int argc, char** argv) {
  using namespace te_fl;
  for (const plugins::PluginInfo& p : plugins::list()) {
    const std::string state(plugins::to_string(p.state));
    std::printf("%s|%s|%s|%s\n", p.name.c_str(), state.c_str(), p.origin.c_str(), p.reason.c_str());
  }
  if (argc > 1 && std::strcmp(argv[1], "--path") == 0) {
    for (const std::string& line : plugins::search_path()) std::printf("path|%s\n", line.c_str());
  }
  const float values[] = {-1, 2};
  auto in = Tensor::from_values({2}, values);
  auto out = Tensor::zeros({2}, DType::kF32);
  if (!in.ok() || !out.ok()) return 2;
  te_fl_relu_args args;
  args.input = *in;
  args.output = *out;
  const Status status = OpManager::instance().call("relu", &args);
  if (!status.ok()) std::printf("relu|error|%s\n", status.to_string().c_str());
  for (const OpUsage& u : OpManager::instance().usage()) {
    if (u.op == "relu")
      std::printf("relu|%s|%g %g\n", u.impl_id.c_str(), out->data<float>()[0],
                  out->data<float>()[1]);
  }
  return 0;
}
