// backends/null, the template for vendor plugins: loaded by path and by manifest, and selected by
// policy.
#include "fault_fixture.hpp"
#include "probe_run.hpp"
#include "support/expect.hpp"

namespace te_fl::test {
namespace {

const char kLibrary[] = FAULT_NULL_FOLDER "/libte_fl_null.so";

TEST(NullPlugin, LoadsRunsAndUnloads) {
  const auto loaded = plugins::load(kLibrary);
  ASSERT_OK(loaded);
  EXPECT_EQ(loaded->name, "null");
  EXPECT_EQ(loaded->vendor, "null");
  EXPECT_EQ(loaded->ops, (std::vector<std::string>{"relu: vendor.null"}));
  {
    const PolicyScope scope(only("relu", "vendor.null"));
    const Tensor in = floats({-1, 2, -3, 4}), out = floats({9, 9, 9, 9});
    const Status status = call_relu(in, out);
    EXPECT_OK(status);
    EXPECT_EQ(values_of(out), (std::vector<float>{0, 2, 0, 4}));
    // A tensor that is not compact is refused with a reason before anything is written.
    const Tensor wide = Tensor::zeros({4, 2}, DType::kF32).value();
    const Status refused =
        call_relu(wide.transpose(0, 1).value(), Tensor::zeros({2, 4}, DType::kF32).value());
    EXPECT_FAILS(refused, kUnsupported, "compact");
  }
  EXPECT_OK(plugins::deactivate("null", true));
  EXPECT_FALSE(in_maps(kLibrary));
}

TEST(NullPlugin, IsFoundByItsManifestAndSelectedByPolicy) {
  const std::map<std::string, std::string> found = {{"TE_FL_PLUGIN_PATH", FAULT_NULL_FOLDER}};
  ProbeRun run = run_probe(found);
  EXPECT_EQ(run.line("null"), "null|active|" FAULT_NULL_FOLDER "/null.json|") << run.log;
  auto reference = found;
  reference["TE_FL_PREFER"] = "reference";
  EXPECT_LACKS(run_probe(reference).output, "relu|vendor.null|");
  for (const auto& [name, value] :
       std::map<std::string, std::string>{{"TE_FL_PREFER", "vendor"},
                                          {"TE_FL_PREFER_VENDOR", "1"},
                                          {"TE_FL_PER_OP", "relu=vendor:null"},
                                          {"TE_FL_PER_OP ", "relu=impl:vendor.null|reference"}}) {
    auto environment = found;
    environment[name.substr(0, name.find(' '))] = value;
    run = run_probe(environment);
    EXPECT_HAS(run.output, "relu|vendor.null|0 2") << name << ": " << run.output << run.log;
  }
  auto denied = found;
  denied["TE_FL_PREFER"] = "vendor";
  denied["TE_FL_DENY_VENDORS"] = "NULL";
  run = run_probe(denied);
  EXPECT_LACKS(run.output, "vendor.null|0 2");
  EXPECT_HAS(run.output, "|0 2");
}

TEST(NullPlugin, IsSelectedWhenNamedByModules) {
  const ProbeRun run = run_probe({{"TE_FL_PLUGIN_MODULES", kLibrary}, {"TE_FL_PREFER", "vendor"}});
  EXPECT_HAS(run.output, "relu|vendor.null|0 2") << run.output << run.log;
}

}  // namespace
}  // namespace te_fl::test
