// Tests policies in the file that TE_FL_POLICY_FILE names, including files that te-fl tune writes.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "support/temp_folder.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl {
namespace {

class PolicyFile : public ::testing::Test {
 protected:
  void TearDown() override {
    for (const char* name : {"TE_FL_POLICY_FILE", "TE_FL_STRICT", "TE_FL_PER_OP", "TE_FL_TRACE"})
      ASSERT_OK(environment::unset(name));
  }
  void use(const std::string& text) {
    ASSERT_OK(environment::set("TE_FL_POLICY_FILE", folder.write("policy.json", text)));
  }
  std::string parse_error(const std::string& text) {
    const auto loaded = load_policy_file(folder.write("wrong.json", text));
    return loaded.ok() ? "" : loaded.status().to_string();
  }
  test::TempFolder folder;
};

TEST_F(PolicyFile, SaysAllThatTheVariablesCanAndTheyWinOverIt) {
  use(R"({"te_fl_policy": 1, "prefer": "vendor", "strict": true, "deterministic": true,
          "max_staged_bytes": 5, "allow_vendors": ["Acme"], "deny_vendors": ["b"],
          "per_op": {"gelu": ["reference", "vendor:x", "impl:a.b"], "relu": ["flagos"]},
          "per_signature": [{"op": "gelu", "dtypes": ["bf16"], "use": ["reference"]}]})");
  const PolicySettings s = current_policy().value().settings();
  EXPECT_EQ(s.prefer, Kind::kVendor);
  EXPECT_TRUE(s.strict && s.deterministic);
  EXPECT_EQ(s.max_staged_bytes, 5u);
  EXPECT_EQ(s.allow_vendors, std::vector<std::string>{"acme"});
  EXPECT_EQ(s.deny_vendors, std::vector<std::string>{"b"});
  EXPECT_EQ(s.per_op.at("gelu").size(), 3u);
  ASSERT_EQ(s.per_signature.size(), 1u);
  EXPECT_EQ(s.per_signature[0].scalings, TE_FL_BIT(TE_FL_SCALING_NONE));
  ASSERT_OK(environment::set("TE_FL_STRICT", "0"));
  ASSERT_OK(environment::set("TE_FL_PER_OP", "gelu=flagos"));
  const PolicySettings t = current_policy().value().settings();
  EXPECT_FALSE(t.strict);
  EXPECT_TRUE(t.deterministic);
  EXPECT_EQ(t.per_op.at("gelu").size(), 1u);
  EXPECT_EQ(t.per_op.count("relu"), 1u);
  EXPECT_TRUE(t.per_signature.empty()) << "a list of the environment wins over the file's";
  PolicySettings code;
  code.prefer = Kind::kReference;
  const PolicyScope scope(code);
  EXPECT_EQ(current_policy().value().settings(), code) << "code replaces both";
}

TEST_F(PolicyFile, AListForASignatureAppliesToItAlone) {
  use(R"({"te_fl_policy": 1, "per_signature": [
        {"op": "gelu", "device": "cpu", "dtypes": ["bf16"], "use": ["reference", "default"]}]})");
  OpManager& manager = OpManager::instance();
  const OpId gelu = *manager.registry().find("gelu");
  const auto chosen = [&](DType dtype) {
    const Tensor x = Tensor::zeros({4, 8}, dtype).value();
    te_fl_gelu_args args;
    args.input = args.output = x;
    return manager.resolve(gelu, &args)->impl_id;
  };
  EXPECT_EQ(chosen(DType::kBF16), "reference.host");
  EXPECT_EQ(chosen(DType::kF32), "default.cpu");
}

// A per_signature list with a range of sizes applies only to calls of these sizes, whether made
// directly, through a handle, or queried by resolve().
TEST_F(PolicyFile, AListForSizesAppliesToTheseSizesAlone) {
  use(R"({"te_fl_policy": 1, "per_signature": [
        {"op": "gelu", "dtypes": ["bf16"], "bytes": [64, 255], "use": ["reference"]},
        {"op": "gelu", "dtypes": ["bf16"], "bytes": [4096, 5000], "use": ["reference"]}]})");
  OpManager& manager = OpManager::instance();
  const OpId gelu = *manager.registry().find("gelu");
  const auto count = [&] {
    uint64_t calls = 0;
    for (const OpUsage& u : manager.usage()) {
      if (u.op == "gelu" && u.impl_id == "reference.host") calls += u.calls;
    }
    return calls;
  };
  // Returns true if dispatch chooses the reference backend for calls whose input and output take
  // `bytes` in total.
  const auto is_pinned = [&](int64_t bytes) {
    const Tensor x = Tensor::zeros({bytes / 4}, DType::kBF16).value();
    const Tensor y = Tensor::zeros({bytes / 4}, DType::kBF16).value();
    te_fl_gelu_args args;
    args.input = x, args.output = y;
    const bool resolved = manager.resolve(gelu, &args)->impl_id == "reference.host";
    const uint64_t before = count();
    for (int i = 0; i < 2; ++i) EXPECT_OK(manager.call(gelu, &args));
    EXPECT_EQ(count() - before, resolved ? 2u : 0u) << bytes;
    const auto handle = manager.prepare(gelu, &args);
    EXPECT_OK(handle);
    EXPECT_OK(handle->call(&args));
    EXPECT_EQ(count() - before, resolved ? 3u : 0u) << bytes;
    return resolved;
  };
  for (int round = 0; round < 2; ++round) {
    EXPECT_TRUE(is_pinned(64));
    EXPECT_TRUE(is_pinned(252));
    EXPECT_FALSE(is_pinned(60));
    EXPECT_FALSE(is_pinned(256));
    EXPECT_FALSE(is_pinned(1 << 20));
    EXPECT_TRUE(is_pinned(4096));
  }
  CallProfile profile;
  profile.dtypes = {DType::kBF16};
  EXPECT_EQ(manager.explain(gelu, profile)->impl_id, "default.cpu") << "a call of no known size";
  EXPECT_HAS(manager.explain(gelu, profile)->policy, "gelu@cpu:bf16:none:64..255=reference");
}

TEST_F(PolicyFile, MistakesAreErrorsThatNameTheNearest) {
  EXPECT_HAS(parse_error("{"), "is not JSON");
  EXPECT_HAS(parse_error("{}"), "\"te_fl_policy\": 1");
  const auto with = [&](const std::string& rest) {
    return parse_error("{\"te_fl_policy\": 1, " + rest + "}");
  };
  EXPECT_HAS(with(R"("prefr": "vendor")"), "did you mean 'prefer'");
  EXPECT_HAS(with(R"("prefer": "vendr")"), "did you mean 'vendor'");
  EXPECT_HAS(with(R"("prefer": 1)"), "prefer must be a string");
  EXPECT_HAS(with(R"("strict": 1)"), "strict must be true or false");
  EXPECT_HAS(with(R"("max_staged_bytes": -1)"), "whole number");
  EXPECT_HAS(with(R"("per_op": {"gelo": ["vendor"]})"), "did you mean 'gelu'");
  EXPECT_HAS(with(R"("per_op": {"gelu": ["vendr"]})"), "did you mean 'vendor'");
  EXPECT_HAS(with(R"("per_op": {"gelu": "vendor"})"), "list of strings");
  EXPECT_HAS(with(R"("per_op": {"gelu": ["vendor"], "gelu": ["reference"]})"),
             "has the key 'gelu' twice in one object");
  const std::string list = R"({"op": "gelu", "dtypes": ["bf16"], "use": ["vendor"]})";
  EXPECT_EQ(with("\"per_signature\": [" + list + "]"), "");
  EXPECT_HAS(with("\"per_signature\": [" + list + "," + list + "]"), "appears twice");
  EXPECT_HAS(with(R"("per_signature": [{"op": "gelu", "use": ["vendor"]}])"), "lacks");
  const auto sized = [](const std::string& bytes) {
    return R"({"op": "gelu", "dtypes": ["bf16"], "bytes": )" + bytes + R"(, "use": ["vendor"]})";
  };
  for (const char* bytes : {"[1]", "5", "[-1, 5]", "[6, 5]", "[\"1\", 5]"})
    EXPECT_HAS(with("\"per_signature\": [" + sized(bytes) + "]"), "must be [least, most]");
  EXPECT_EQ(with("\"per_signature\": [" + sized("[0, 7]") + "," + sized("[8, 9]") + "]"), "");
  EXPECT_HAS(with("\"per_signature\": [" + sized("[0, 8]") + "," + sized("[8, 9]") + "]"),
             "appears twice");
  EXPECT_HAS(with("\"per_signature\": [" + list + "," + sized("[8, 9]") + "]"), "appears twice");
  EXPECT_HAS(with(R"("per_signature": [{"op": "gelu", "dtypes": ["bf61"], "use": ["vendor"]}])"),
             "bf16");
  use(R"({"te_fl_policy": 1, "per_op": {"gelo": ["vendor"]}})");
  EXPECT_HAS(current_policy().status().to_string(), "did you mean 'gelu'");
}

TEST_F(PolicyFile, AMissingFileIsDistinguishedFromAnUnreadableOne) {
  EXPECT_EQ(load_policy_file(folder / "none.json").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(load_policy_file(folder / "none/none.json").status().code(), StatusCode::kNotFound);
  for (const std::string& path : {folder / "", std::string("/dev/null")}) {
    const Status status = load_policy_file(path).status();
    EXPECT_FAILS(status, kFailedPrecondition, "the policy file " + path);
  }
}

TEST_F(PolicyFile, TuningPinsTheFastestOfATracedRun) {
  ASSERT_OK(environment::set("TE_FL_TRACE", folder / "run.json"));
  OpManager& manager = OpManager::instance();
  const Tensor a = Tensor::zeros({96, 96}, DType::kF32).value();
  const Tensor b = Tensor::zeros({96, 96}, DType::kF32).value();
  const Tensor c = Tensor::zeros({96, 96}, DType::kF32).value();
  te_fl_generic_gemm_args args;
  args.a = a, args.b = b, args.d = c;
  for (int i = 0; i < 3; ++i) ASSERT_OK(manager.call("generic_gemm", &args));
  ASSERT_OK(write_trace());
  ASSERT_OK(environment::unset("TE_FL_TRACE"));
  std::vector<std::string> left_out;
  const auto rows = tune({folder / "run.json"}, 0.01, &left_out);
  ASSERT_OK(rows);
  EXPECT_TRUE(left_out.empty()) << left_out[0];
  ASSERT_EQ(rows->size(), 1u);
  const TunedSignature& row = rows->front();
  EXPECT_EQ(row.count, 3u);
  EXPECT_EQ(row.list.dtypes, TE_FL_BIT(TE_FL_F32));
  ASSERT_EQ(row.times.size(), 2u);
  EXPECT_EQ(row.times[0].impl_id, "default.cpu") << "plain loops are slower";
  EXPECT_LT(row.times[0].seconds, row.times[1].seconds);
  EXPECT_TRUE(row.list.use.empty()) << "that is what dispatch takes by itself";
  ASSERT_OK(manager.registry().set_priority("generic_gemm", "default.cpu", 1));
  const auto again = tune({folder / "run.json"}, 0.01, &left_out);
  ASSERT_OK(manager.registry().set_priority("generic_gemm", "default.cpu", 150));
  ASSERT_OK(again);
  ASSERT_EQ(again->front().list.use.size(), 5u);
  EXPECT_EQ(again->front().list.use[0].name, "default.cpu");
  EXPECT_FALSE(tune({folder.write("other.json", "{}")}, 0.01).ok());
}

// Numbers that exceed every C++ type are errors, at any place of the JSON file.
TEST_F(PolicyFile, NumbersThatNoProgramHoldsAreErrors) {
  const char* const places[] = {R"(NUMBER)",
                                R"([NUMBER])",
                                R"({"te_fl_policy": NUMBER})",
                                R"({"te_fl_policy": 1, "max_staged_bytes": NUMBER})",
                                R"({"te_fl_policy": 1, "prefer": NUMBER})",
                                R"({"te_fl_policy": 1, "strict": NUMBER})",
                                R"({"te_fl_policy": 1, "deny_vendors": [NUMBER]})",
                                R"({"te_fl_policy": 1, "per_op": {"gelu": [NUMBER]}})",
                                R"({"te_fl_policy": 1, "per_op": {"gelu": NUMBER}})",
                                R"({"te_fl_policy": 1, "per_signature": [NUMBER]})",
                                R"({"te_fl_policy": 1, "per_signature":
          [{"op": "gelu", "dtypes": ["f32"], "bytes": [0, NUMBER], "use": ["reference"]}]})"};
  for (const char* place : places) {
    for (const char* number : {"1e999", "-1e999", "123456789012345678901234567890", "1e-999"}) {
      std::string text = place;
      text.replace(text.find("NUMBER"), 6, number);
      const std::string error = parse_error(text);
      EXPECT_HAS(error, "wrong.json");
      EXPECT_EQ(error.find("json.exception"), std::string::npos) << error;
      ASSERT_OK(environment::set("TE_FL_POLICY_FILE", folder.write("policy.json", text)));
      te_fl_gelu_args args{};
      // The call returns an error and does not end the process.
      EXPECT_FALSE(OpManager::instance().call("gelu", &args).ok()) << text;
      ASSERT_OK(environment::unset("TE_FL_POLICY_FILE"));
    }
  }
}

// The user named the file, so calls fail until it is valid; the message names the file and its
// problem.
TEST_F(PolicyFile, OneThatIsNoWholeFileIsAnErrorThatNamesIt) {
  EXPECT_HAS(parse_error(""), "wrong.json is empty");
  EXPECT_HAS(parse_error(" \n"), "wrong.json is empty");
  const std::string whole = R"({"te_fl_policy": 1, "per_op": {"gelu": ["reference"]}})";
  EXPECT_EQ(parse_error(whole), "");
  for (size_t bytes = 1; bytes < whole.size(); ++bytes) {
    EXPECT_HAS(parse_error(whole.substr(0, bytes)), "wrong.json is not JSON") << bytes;
  }
  EXPECT_HAS(parse_error(std::string("\x7f"
                                     "ELF\0",
                                     5)),
             "is not JSON");
  EXPECT_HAS(parse_error(R"({"te_fl_quarantine": 1})"), "te_fl_quarantine");
  const auto problem = [](const std::string& path) {
    return load_policy_file(path).status().to_string();
  };
  EXPECT_HAS(problem(folder.path()), "is a folder");
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_HAS(problem(pipe), "is a device, a pipe or a socket") << "not waited for";
  EXPECT_HAS(problem(folder / "none"), "No such file");
  // Checks the error text as a user sees it.
  ASSERT_OK(environment::set("TE_FL_POLICY_FILE", folder.write("empty.json", "")));
  OpRegistry registry;
  OpManager manager(registry);
  testing::Fake fake("default.x");
  ASSERT_OK(registry.register_op(fake.desc, "test"));
  testing::FiveCall call;
  EXPECT_HAS(manager.call("test::five", &call.args).to_string(), "empty.json is empty");
  EXPECT_EQ(fake.runs, 0);
}

}  // namespace
}  // namespace te_fl
