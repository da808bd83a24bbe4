// A library that calls the copy of libte_fl that it is linked with; the test program itself is not
// linked with libte_fl.
#include <string>

#include "te_fl/op_manager.hpp"
#include "te_fl/op_registry.hpp"
#include "te_fl/ops/activation.h"
#include "te_fl/plugins.hpp"
#include "te_fl/tensor.hpp"

namespace {

std::string run(const char* plugin, void** manager) {
  using namespace te_fl;
  *manager = &OpManager::instance();
  const auto loaded = plugins::load(plugin);
  if (!loaded.ok()) return loaded.status().to_string();
  PolicySettings settings;
  settings.per_op["relu"] = {{PolicyToken::Type::kImpl, Kind::kVendor, "vendor.fault"}};
  const PolicyScope scope(settings);
  const float values[] = {-1, 2, -3, 4};
  auto in = Tensor::from_values({4}, values);
  auto out = Tensor::zeros({4}, DType::kF32);
  if (!in.ok() || !out.ok()) return "no tensors";
  te_fl_relu_args args;
  args.input = *in;
  args.output = *out;
  const Status status = OpManager::instance().call("relu", &args);
  if (!status.ok()) return status.to_string();
  const float* y = out->data<float>();
  return y[0] == 0 && y[1] == 2 && y[2] == 0 && y[3] == 4 ? "" : "wrong result";
}

}  // namespace

// Loads a plugin into this copy and calls its relu. Returns null on success, otherwise an error
// text. `manager` receives the address of this copy's OpManager.
extern "C" __attribute__((visibility("default"))) const char* fault_run(const char* plugin,
                                                                        void** manager) {
  static std::string text;
  text = run(plugin, manager);
  return text.empty() ? nullptr : text.c_str();
}

// Queries this copy's registry, so that this copy keeps a record for the calling thread. Returns 0
// on success.
extern "C" __attribute__((visibility("default"))) int fault_ask() {
  return te_fl::OpRegistry::instance().find("relu").ok() ? 0 : 1;
}
