// TE_FL_VERIFY finds wrong results, saves the call, replays it and quarantines the implementation.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <thread>

#include "dispatch/watch/barred.hpp"
#include "dispatch/watch/compare_outputs.hpp"
#include "dispatch/watch/quarantine.hpp"
#include "registry/registry_impl.hpp"
#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "support/far_device.hpp"
#include "support/temp_folder.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl {
namespace {

using testing::Fake;
using testing::FarDevice;
using testing::FiveArgs;
using testing::FiveCall;
using testing::SaveArgs;

// out = a + b + c + d on compact F32 tensors; `off` is added to element 1 as an error.
te_fl_status sum(const FiveArgs& args, float off) {
  const auto at = [](const te_fl_tensor* t) { return static_cast<float*>(t->dl.data); };
  int64_t n = 1;
  for (int d = 0; d < args.a->dl.ndim; ++d) n *= args.a->dl.shape[d];
  for (int64_t i = 0; i < n; ++i) {
    at(args.out)[i] = at(args.a)[i] + at(args.b)[i] + at(args.c)[i] + at(args.d)[i];
    if (i == 1) at(args.out)[i] += off;
  }
  return TE_FL_OK;
}

// The exchange of a job whose other ranks found nothing.
Result<std::vector<std::string>> alone(const std::string& own) {
  return own.empty() ? std::vector<std::string>() : std::vector<std::string>{own};
}

class Verify : public ::testing::Test {
 protected:
  void SetUp() override {
    set("TE_FL_VERIFY_DIR", folder / "cases");
    set("TE_FL_QUARANTINE_FILE", folder / "quarantine.json");
    dispatch::forget_quarantine_file();
    fast.run_body = [this](const te_fl_context&, const void* raw) {
      return sum(*static_cast<const FiveArgs*>(raw), off);
    };
    reference.run_body = [](const te_fl_context&, const void* raw) {
      return sum(*static_cast<const FiveArgs*>(raw), 0);
    };
    add(fast);
    add(reference);
    before = verify_counts();
  }
  void TearDown() override {
    set_rank_exchange({});
    (void)step_boundary();  // leaves no pending entries for the next test
    for (const std::string& name : names) ASSERT_OK(environment::unset(name));
    dispatch::forget_quarantine_file();
  }
  void set(const std::string& name, const std::string& value) {
    ASSERT_OK(environment::set(name, value));
    names.push_back(name);
  }
  void add(Fake& f) {
    ASSERT_OK(registry.register_op(f.desc, "test", "acme"));
    op = *registry.find(f.desc.op_name);
  }
  VerifyCounts counts() const {
    VerifyCounts now = verify_counts();
    now.agreed -= before.agreed, now.differed -= before.differed, now.saved -= before.saved;
    now.captured -= before.captured, now.skipped -= before.skipped, now.failed -= before.failed;
    return now;
  }

  test::TempFolder folder;
  std::vector<std::string> names;
  float off = 0;
  Fake fast{"default.fast"}, reference{"reference.slow"};
  OpRegistry registry;
  OpManager manager{registry};
  OpId op;
  VerifyCounts before;
};

TEST_F(Verify, RightResultsAgreeAndWrongOnesAreFoundAndSaved) {
  set("TE_FL_VERIFY", "1");
  FiveCall call;
  call.tensors[0].data<float>()[1] = 2;
  ASSERT_OK(manager.call(op, &call.args));
  EXPECT_EQ(counts().agreed, 1u);
  off = 1e-3f;
  ASSERT_OK(manager.call(op, &call.args));
  EXPECT_EQ(counts().differed, 1u);
  EXPECT_EQ(counts().saved, 1u);
  EXPECT_EQ(call.tensors[4].data<float>()[1], 2.001f) << "the results are the caller's to keep";
  EXPECT_EQ(reference.runs, 2);
  int files = 0;
  for (const auto& e : std::filesystem::directory_iterator(folder / "cases")) {
    EXPECT_EQ(e.path().extension(), ".call");
    ++files;
  }
  EXPECT_EQ(files, 1);
}

TEST_F(Verify, AnInfinityAgreesWithOneOfItsSignAlone) {
  set("TE_FL_VERIFY", "1");
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  FiveCall call;
  call.tensors[0].data<float>()[1] = kInfinity;
  ASSERT_OK(manager.call(op, &call.args));
  EXPECT_EQ(counts().agreed, 1u);
  for (const float wrong : {0.0f, 3e38f, -kInfinity}) {
    fast.run_body = [wrong](const te_fl_context&, const void* raw) {
      const auto& args = *static_cast<const FiveArgs*>(raw);
      const te_fl_status status = sum(args, 0);
      static_cast<float*>(args.out->dl.data)[1] = wrong;
      return status;
    };
    ASSERT_OK(manager.call(op, &call.args));
  }
  EXPECT_EQ(counts().differed, 3u);
}

// Masks often contain the largest finite number in place of an infinity. It must not raise the
// tolerance for the other elements.
TEST_F(Verify, TheLargestNumberHidesNoErrorInOthers) {
  set("TE_FL_VERIFY", "1");
  for (const float largest : {std::numeric_limits<float>::max(), -1e30f}) {
    FiveCall call;
    call.tensors[0].data<float>()[0] = largest;
    call.tensors[0].data<float>()[1] = 2;
    off = 0;
    ASSERT_OK(manager.call(op, &call.args));
    off = 1e-3f;
    ASSERT_OK(manager.call(op, &call.args));
  }
  EXPECT_EQ(counts().agreed, 2u);
  EXPECT_EQ(counts().differed, 2u);
}

// One large element must not raise the tolerance for the others.
TEST_F(Verify, OneLargeValueHidesNoErrorInOthers) {
  set("TE_FL_VERIFY", "1");
  Fake right("reference.slow"), quick("default.fast");
  float wrong = 0;
  const auto write = [](const void* raw, float error) -> te_fl_status {
    const auto& out = static_cast<const te_fl_add_args*>(raw)->output->dl;
    for (int64_t i = 0; i < 4096; ++i)
      static_cast<float*>(out.data)[i] = static_cast<float>(i % 64 + 1) * (1 + error);
    static_cast<float*>(out.data)[2000] = 1e9f;
    return TE_FL_OK;
  };
  right.run_body = [&](const te_fl_context&, const void* raw) { return write(raw, 0); };
  quick.run_body = [&](const te_fl_context&, const void* raw) { return write(raw, wrong); };
  for (Fake* f : {&right, &quick}) {
    f->desc.op_name = "add", f->desc.schema = nullptr, f->desc.later_args = nullptr;
    f->desc.dtypes = TE_FL_MASK_ANY_DTYPE;
    add(*f);
  }
  const Tensor a = Tensor::zeros({64, 64}, DType::kF32).value(), b = a, out = a;
  te_fl_add_args args;
  args.a = a, args.b = b, args.output = out;
  ASSERT_OK(manager.call(op, &args));
  EXPECT_EQ(counts().differed, 0u);
  wrong = 1e-3f;
  ASSERT_OK(manager.call(op, &args));
  EXPECT_EQ(counts().differed, 1u);
}

// BF16 results that were cut off instead of rounded, and codes that are all one step low, are
// within the tolerance one by one.
TEST_F(Verify, ADirectionIsFoundThatRoundingDoesNotHave) {
  set("TE_FL_VERIFY", "1");
  Fake right("reference.slow"), quick("default.fast");
  int lower = 0;  // elements that are one step nearer to zero
  const auto write = [](const void* raw, int low) -> te_fl_status {
    const auto& out = static_cast<const te_fl_add_args*>(raw)->output->dl;
    for (int i = 0; i < 1024; ++i)
      static_cast<uint16_t*>(out.data)[i] =
          static_cast<uint16_t>(0x3F80 + i % 64 - (i < low ? 1 : 0));
    return TE_FL_OK;
  };
  right.run_body = [&](const te_fl_context&, const void* raw) { return write(raw, 0); };
  quick.run_body = [&](const te_fl_context&, const void* raw) { return write(raw, lower); };
  for (Fake* f : {&right, &quick}) {
    f->desc.op_name = "add", f->desc.schema = nullptr, f->desc.later_args = nullptr;
    f->desc.dtypes = TE_FL_MASK_ANY_DTYPE;
    add(*f);
  }
  const Tensor a = Tensor::zeros({1024}, DType::kBF16).value(), b = a, out = a;
  te_fl_add_args args;
  args.a = a, args.b = b, args.output = out;
  for (const auto& [low, differed] : {std::pair{0, 0u}, {100, 0u}, {512, 1u}, {1024, 2u}}) {
    lower = low;
    ASSERT_OK(manager.call(op, &args));
    EXPECT_EQ(counts().differed, differed) << low;
  }
}

// A halved scale of one block halves its values, and codes that are all one step low are a
// neighbour each. FP4 codes with a scale of 1 for each block of 16, and an amax that makes the
// factor of the tensor 1.
TEST_F(Verify, HalvedBlockScalesAndLowCodesAreFound) {
  set("TE_FL_VERIFY", "1");
  Fake right("reference.slow"), quick("default.fast");
  uint8_t scale = 0x38;  // of one block, E4M3; 0x38 is 1
  int low = 0;           // the codes that are one step lower
  const auto write = [](const void* raw, uint8_t one, int lower) -> te_fl_status {
    const te_fl_tensor& out = *static_cast<const te_fl_gelu_args*>(raw)->output;
    std::memset(out.quant->scale_inv, 0x38, 128 * 4);  // a row has two blocks, padded to 4
    static_cast<uint8_t*>(out.quant->scale_inv)[1] = one;
    *static_cast<float*>(out.quant->amax) = 6 * 448;
    for (int i = 0; i < 2048; ++i) {
      const int code = 1 + i % 7 - (2 * i < lower ? 1 : 0);
      static_cast<uint8_t*>(out.dl.data)[i] = static_cast<uint8_t>(code | code << 4);
    }
    return TE_FL_OK;
  };
  right.run_body = [&](const te_fl_context&, const void* raw) { return write(raw, 0x38, 0); };
  quick.run_body = [&](const te_fl_context&, const void* raw) { return write(raw, scale, low); };
  for (Fake* f : {&right, &quick}) {
    f->desc.op_name = "gelu", f->desc.schema = nullptr, f->desc.later_args = nullptr;
    f->desc.dtypes = TE_FL_MASK_ANY_DTYPE;
    f->desc.scalings = 0x3f;
    add(*f);
  }
  const int64_t shape[] = {128, 32};
  const Tensor in = Tensor::zeros({128, 32}, DType::kF32).value();
  const Tensor out = Tensor::empty_quantized(
                         shape, {.dtype = DType::kF4E2M1, .scaling = Scaling::kNVFP4}, Device{})
                         .value();
  te_fl_gelu_args args;
  args.input = in, args.output = out;
  ASSERT_OK(manager.call(op, &args));
  EXPECT_EQ(counts().differed, 0u);
  scale = 0x30;
  ASSERT_OK(manager.call(op, &args));
  EXPECT_EQ(counts().differed, 1u) << "half of the scale";
  scale = 0x38, low = 128;
  ASSERT_OK(manager.call(op, &args));
  EXPECT_EQ(counts().differed, 1u) << "ties may be rounded either way";
  low = 4096;
  ASSERT_OK(manager.call(op, &args));
  EXPECT_EQ(counts().differed, 2u);
}

TEST_F(Verify, SavesNoMoreThanTheFolderIsToHold) {
  set("TE_FL_VERIFY", "1");
  set("TE_FL_VERIFY_CASES", "2");
  off = 1;
  FiveCall call;
  for (int i = 0; i < 5; ++i) ASSERT_OK(manager.call(op, &call.args));
  EXPECT_EQ(counts().differed, 5u);
  EXPECT_EQ(counts().saved, 2u);
}

TEST_F(Verify, ASubnormalNumberInF16MayBeEightStepsOff) {
  set("TE_FL_VERIFY", "1");
  uint16_t first = 0x0023;
  const auto write = [](const void* raw, uint16_t number) -> te_fl_status {
    const auto& args = *static_cast<const FiveArgs*>(raw);
    *static_cast<uint16_t*>(args.out->dl.data) = number;
    return TE_FL_OK;
  };
  reference.run_body = [&](const te_fl_context&, const void* raw) { return write(raw, 0x0023); };
  fast.run_body = [&](const te_fl_context&, const void* raw) { return write(raw, first); };
  FiveCall call(DType::kF16);
  first = 0x002b;
  ASSERT_OK(manager.call(op, &call.args));
  EXPECT_EQ(counts().agreed, 1u);
  first = 0x002d;
  ASSERT_OK(manager.call(op, &call.args));
  EXPECT_EQ(counts().differed, 1u);
}

// An optimizer step of a BF16 parameter may change only its last bit, as a rounding difference
// does. A skipped step is therefore found by the parameter not changing at all.
TEST_F(Verify, AStepThatIsNotTakenIsFoundHoweverSmallItIs) {
  uint32_t places = 1;  // change of the parameter, in F32 units in the last place
  const auto step = [&](const void* raw, int skipped) -> te_fl_status {
    const auto& args = *static_cast<const te_fl_multi_tensor_sgd_args*>(raw);
    const te_fl_dltensor& p = args.params[0]->dl;
    for (int64_t i = skipped; i < p.shape[0]; ++i) {
      if (p.dtype.bits == 32) {
        static_cast<uint32_t*>(p.data)[i] += places;
      } else {
        ++static_cast<uint16_t*>(p.data)[i];
      }
    }
    return TE_FL_OK;
  };
  int skipped = 0;
  Fake right("reference.slow"), quick("default.fast");
  right.run_body = [&](const te_fl_context&, const void* raw) { return step(raw, 0); };
  quick.run_body = [&](const te_fl_context&, const void* raw) { return step(raw, skipped); };
  for (Fake* f : {&right, &quick}) {
    f->desc.op_name = "multi_tensor_sgd";
    f->desc.schema = nullptr;
    f->desc.later_args = nullptr;
    f->desc.dtypes = TE_FL_MASK_ANY_DTYPE;
    add(*f);
  }
  set("TE_FL_VERIFY", "1");
  const Tensor p = Tensor::zeros({1000}, DType::kBF16).value();
  const Tensor g = Tensor::zeros({1000}, DType::kBF16).value();
  const Tensor m = Tensor::zeros({1000}, DType::kF32).value();
  const std::array<const te_fl_tensor*, 3> all{g, p, m};
  te_fl_multi_tensor_sgd_args args;
  args.grads_count = args.params_count = args.momentums_count = 1;
  args.grads = &all[0], args.params = &all[1], args.momentums = &all[2];
  const auto differed = [&](int without, bool alike) {
    skipped = without;
    for (int i = 0; i < 1000; ++i) {
      p.data<uint16_t>()[i] = static_cast<uint16_t>(0x3F80 + (alike ? 0 : i % 64));
    }
    const uint64_t so_far = counts().differed;
    EXPECT_OK(manager.call(op, &args));
    return counts().differed - so_far;
  };
  EXPECT_EQ(differed(0, false), 0u);
  EXPECT_EQ(differed(300, false), 0u) << "rounding may decide on some";
  EXPECT_EQ(differed(1000, true), 0u) << "and on all that are alike";
  EXPECT_EQ(differed(1000, false), 1u);
  ASSERT_EQ(counts().saved, 1u);
  const auto saved = std::filesystem::directory_iterator(folder / "cases")->path();
  std::ifstream file(saved, std::ios::binary);
  const std::string contents(std::istreambuf_iterator<char>(file), {});
  EXPECT_HAS(contents, "'params[0]': 1000 of 1000 elements that the call changes are as before");
  const Tensor p32 = Tensor::zeros({1000}, DType::kF32).value();
  for (int i = 0; i < 1000; ++i) p32.data<float>()[i] = 1 + static_cast<float>(i) / 1000;
  const te_fl_tensor* const params = p32;
  args.params = &params;
  EXPECT_EQ(differed(1000, false), 0u) << "a last place of F32 may be what both compute anew";
  places = 32;
  EXPECT_EQ(differed(1000, false), 1u) << "less than the share that F32 may differ by";
}

TEST_F(Verify, AnInputThatIsTheOutputIsCopiedBeforeItIsOverwritten) {
  set("TE_FL_VERIFY", "1");
  FiveCall call;
  call.args.out = call.tensors[0];
  call.tensors[0].data<float>()[0] = 3;
  call.tensors[1].data<float>()[0] = 4;
  ASSERT_OK(manager.call(op, &call.args));
  EXPECT_EQ(counts().agreed, 1u);
  EXPECT_EQ(call.tensors[0].data<float>()[0], 7);
}

TEST_F(Verify, TheReferenceIsNotComparedWithItself) {
  set("TE_FL_VERIFY", "1");
  PolicySettings s;
  s.prefer = Kind::kReference;
  const PolicyScope scope(s);
  FiveCall call;
  ASSERT_OK(manager.call(op, &call.args));
  EXPECT_EQ(counts().skipped, 1u);
  EXPECT_EQ(reference.runs, 1);
}

TEST_F(Verify, PicksTheSameCallsInEveryRunAndOthersWithAnotherSeed) {
  set("TE_FL_VERIFY", "0.25:test::five");
  FiveCall call;
  std::vector<int> picked;
  const auto run = [&] {
    std::vector<int> which;
    for (int i = 0; i < 400; ++i) {
      const int seen = reference.runs;
      EXPECT_OK(manager.call(op, &call.args));
      if (reference.runs != seen) which.push_back(i);
    }
    return which;
  };
  const std::vector<int> first = run();
  EXPECT_GT(first.size(), 60u);
  EXPECT_LT(first.size(), 140u);
  EXPECT_EQ(counts().agreed, first.size());
  set("TE_FL_VERIFY", "0.25:gelu");
  EXPECT_TRUE(run().empty()) << "another op's calls";
}

TEST_F(Verify, AWrongSettingMakesCallsFailAndNamesTheNearestOp) {
  FiveCall call;
  for (const char* value : {"2", "0", "x", "nan", "-1", ":gelu"}) {
    set("TE_FL_VERIFY", value);
    const Status s = manager.call(op, &call.args);
    EXPECT_HAS(s.to_string(), "is not a share of calls above 0 and up to 1") << value;
  }
  set("TE_FL_VERIFY", "0.5:gelo");
  EXPECT_HAS(manager.call(op, &call.args).to_string(), "did you mean 'gelu'");
  set("TE_FL_VERIFY", "");
  ASSERT_OK(manager.call(op, &call.args));
}

TEST_F(Verify, QuarantineBeginsWithTheNextCallAndOutlivesTheRun) {
  set("TE_FL_VERIFY", "1");
  set("TE_FL_VERIFY_ACTION", "quarantine");
  off = 1;
  FiveCall call, other(DType::kI32);
  const PreparedOp prepared = manager.prepare(op, &call.args).value();
  ASSERT_OK(prepared.call(&call.args));
  EXPECT_EQ(fast.runs, 1);
  ASSERT_OK(prepared.call(&call.args));
  set("TE_FL_VERIFY", "");
  ASSERT_OK(prepared.call(&call.args));
  ASSERT_OK(manager.call(op, &call.args));
  EXPECT_EQ(fast.runs, 1) << "it still runs";
  EXPECT_EQ(call.tensors[4].data<float>()[1], 0);
  fast.run_body = nullptr;
  ASSERT_OK(manager.call(op, &other.args));
  EXPECT_EQ(fast.runs, 2) << "other signatures are supported";
  const auto reason_shown = [&] {
    const Decision r = manager.resolve(op, &call.args).value();
    EXPECT_EQ(r.impl_id, "reference.slow");
    for (const Candidate& c : r.candidates) {
      if (c.impl_id == "default.fast")
        return testing::contains(c.reason, "quarantined for this op");
    }
    return false;
  };
  EXPECT_TRUE(reason_shown());
  // Simulates a later run, which knows the quarantine from the file only.
  dispatch::forget_quarantine_file();
  registry::choose_again();
  EXPECT_TRUE(reason_shown());
  ASSERT_EQ(quarantines()->size(), 1u);
  EXPECT_EQ(quarantines()->front().dtypes, TE_FL_BIT(TE_FL_F32));
  EXPECT_HAS(quarantines()->front().replay, "te-fl replay " + quarantines()->front().case_file);
  // explain() without a dtype shows no implementation as barred, but names the dtypes for which an
  // implementation is quarantined.
  const auto any = manager.explain(op, {}).value();
  EXPECT_EQ(any.impl_id, "default.fast");
  for (const Candidate& c : any.candidates)
    if (c.impl_id == "default.fast") EXPECT_HAS(c.reason, "quarantined for f32 (scaling none)");
  // Another build of the plugin is a different implementation.
  std::string text = test::read_file(folder / "quarantine.json");
  const std::string build = dispatch::find_build_id("test");
  ASSERT_TRUE(testing::contains(text, build));
  text.replace(text.find(build), build.size(), "other");
  folder.write("quarantine.json", text);
  dispatch::forget_quarantine_file();
  registry::choose_again();
  EXPECT_EQ(manager.resolve(op, &call.args)->impl_id, "default.fast");
}

TEST_F(Verify, RanksOfAJobWaitForTheStepBoundary) {
  ASSERT_EQ(setenv("WORLD_SIZE", "2", 1), 0);
  set_rank_exchange(alone);
  set("TE_FL_VERIFY", "1");
  set("TE_FL_VERIFY_ACTION", "quarantine");
  off = 1;
  FiveCall call;
  for (int i = 0; i < 3; ++i) ASSERT_OK(manager.call(op, &call.args));
  EXPECT_EQ(fast.runs, 3) << "one rank alone chose anew";
  ASSERT_OK(step_boundary());
  ASSERT_OK(manager.call(op, &call.args));
  EXPECT_EQ(fast.runs, 3);
  unsetenv("WORLD_SIZE");
}

TEST_F(Verify, NoQuarantineBeginsWhileAStreamIsCaptured) {
  FarDevice far;
  const Device device = devices::add(&far.desc).value();
  Fake native{"vendor.far"};
  native.desc.device_types = uint64_t{1} << TE_FL_DEVICE_EXT;
  native.desc.provider = "far";
  native.desc.vendor = "acme";
  native.desc.flags |= TE_FL_OP_GRAPH_SAFE;
  add(native);
  set("TE_FL_VERIFY", "1");
  set("TE_FL_VERIFY_ACTION", "quarantine");
  off = 1;
  {
    FiveCall call;
    Tensor t[4];
    FiveArgs args;
    for (Tensor& x : t) x = Tensor::zeros({3}, DType::kF32, device).value();
    args.a = t[0], args.b = t[1], args.c = t[2], args.d = t[3], args.out = t[0];
    far.capturing = true;
    ASSERT_OK(manager.call(op, &args));
    ASSERT_OK(manager.call(op, &call.args));  // on the host: the wrong result is found
    ASSERT_OK(manager.call(op, &call.args));
    EXPECT_EQ(fast.runs, 2);
    far.capturing = false;
    // The first call outside the capture applies the quarantine, which takes effect after that
    // call.
    ASSERT_OK(manager.call(op, &call.args));
    ASSERT_OK(manager.call(op, &call.args));
    EXPECT_EQ(fast.runs, 3);
  }
  (void)devices::remove(device);
}

// Entries that are still pending at exit are written to the file for later runs.
TEST_F(Verify, WhatIsHeldAtTheEndIsWritten) {
  const auto run = [&] {
    setenv("WORLD_SIZE", "2", 1);
    set_rank_exchange(alone);
    set("TE_FL_VERIFY", "1");
    set("TE_FL_VERIFY_ACTION", "quarantine");
    off = 1;
    FiveCall call;
    std::exit(manager.call(op, &call.args).ok() && fast.runs == 1 ? 0 : 1);
  };
  EXPECT_EXIT(run(), ::testing::ExitedWithCode(0), "");
  EXPECT_HAS(test::read_file(folder / "quarantine.json"), "default.fast");
}

TEST_F(Verify, AQuarantineFileThatComesAndGoesIsNoError) {
  std::atomic<bool> done{false};
  std::thread other([&] {
    while (!done) {
      folder.write("next.json", R"({"te_fl_quarantine": 1, "entries": []})");
      std::filesystem::rename(folder / "next.json", folder / "quarantine.json");
      std::filesystem::remove(folder / "quarantine.json");
    }
  });
  FiveCall call;
  Status status;
  for (int i = 0; i < 3000 && status.ok(); ++i) {
    dispatch::forget_quarantine_file();
    registry::choose_again();
    status = manager.call(op, &call.args);
  }
  done = true;
  other.join();
  EXPECT_OK(status);
}

TEST_F(Verify, ManyThreadsAreCheckedAtOnce) {
  set("TE_FL_VERIFY", "0.5");
  set("TE_FL_VERIFY_ACTION", "quarantine");
  off = 1;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      FiveCall call;
      for (int i = 0; i < 50; ++i) {
        EXPECT_OK(manager.call(op, &call.args));
        EXPECT_TRUE(i % 10 != 9 || step_boundary().ok());
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(quarantines()->size(), 1u);
  EXPECT_GT(counts().differed, 0u);
}

TEST_F(Verify, TensorsOfADeviceAreCheckedThroughCopies) {
  FarDevice far;
  const Device device = devices::add(&far.desc).value();
  Fake native{"vendor.far"};
  native.desc.device_types = uint64_t{1} << TE_FL_DEVICE_EXT;
  native.desc.provider = "far";
  native.desc.vendor = "acme";
  native.desc.flags |= TE_FL_OP_GRAPH_SAFE;
  native.desc.priority = 500;
  native.run_body = [&](const te_fl_context& ctx, const void* raw) {
    // Runs on the stream, in device memory.
    const auto& args = *static_cast<const FiveArgs*>(raw);
    const int64_t n = args.a->dl.shape[0];
    const te_fl_tensor* in[] = {args.a, args.b, args.c, args.d};
    std::vector<float*> from;
    for (const te_fl_tensor* t : in) from.push_back(reinterpret_cast<float*>(far.real(t->dl.data)));
    auto* to = reinterpret_cast<float*>(far.real(args.out->dl.data));
    far.enqueue(ctx.stream, [from, to, n, off = off] {
      for (int64_t i = 0; i < n; ++i) {
        to[i] = from[0][i] + from[1][i] + from[2][i] + from[3][i] + (i == 1 ? off : 0);
      }
    });
    return TE_FL_OK;
  };
  add(native);
  set("TE_FL_VERIFY", "1");
  {
    Tensor t[4];
    FiveArgs args;
    for (Tensor& x : t) {
      x = Tensor::from_values({3}, std::vector<float>{1, 2, 3})->to(device).value();
    }
    args.a = t[0], args.b = t[1], args.c = t[2], args.d = t[3];
    args.out = t[0];  // in place
    ASSERT_OK(manager.call(op, &args));
    EXPECT_EQ(counts().agreed, 1u);
    off = 1;
    ASSERT_OK(manager.call(op, &args));
    EXPECT_EQ(counts().differed, 1u);
    far.capturing = true;
    ASSERT_OK(manager.call(op, &args));
    EXPECT_EQ(counts().captured, 1u);
    far.capturing = false;
  }
  ASSERT_OK(registry.unregister_op("test::five", "vendor.far"));
  ASSERT_OK(devices::remove(device));
}

// A device reports an invalid value once, to the first caller that waits (rule R12). With
// TE_FL_VERIFY te-fl itself waits first, so it must return the error to the caller.
TEST_F(Verify, ADevicesReportsAboutCopiesReachTheCaller) {
  FarDevice far;
  const Device device = devices::add(&far.desc).value();
  Fake native{"vendor.far"};
  native.desc.device_types = uint64_t{1} << TE_FL_DEVICE_EXT;
  native.desc.provider = "far";
  native.desc.vendor = "acme";
  native.desc.priority = 500;
  bool wrong = true;
  const auto fails = [] { return te_fl_status{TE_FL_INVALID_ARGUMENT}; };
  native.run_body = [&](const te_fl_context& ctx, const void*) {
    if (wrong) far.queues.enqueue(ctx.stream, fails);
    return TE_FL_OK;
  };
  add(native);
  set("TE_FL_VERIFY", "1");
  {
    Tensor t[5];
    for (Tensor& x : t) x = Tensor::zeros({3}, DType::kF32, device).value();
    FiveArgs args;
    args.a = t[0], args.b = t[1], args.c = t[2], args.d = t[3], args.out = t[4];
    EXPECT_FAILS(manager.call(op, &args), kInvalidArgument,
                 "op 'test::five' in 'vendor.far' failed after it was enqueued (TE_FL_VERIFY)");
    EXPECT_EQ(counts().failed, 1u);
    EXPECT_EQ(counts().skipped, 0u);
    // The next error comes from work that was enqueued before the call.
    wrong = false;
    far.queues.enqueue(nullptr, fails);
    const int runs = native.runs;
    EXPECT_FAILS(manager.call(op, &args), kInvalidArgument,
                 "work that was enqueued before op 'test::five' has failed");
    EXPECT_EQ(native.runs, runs) << "nobody knows what it would have read";
    EXPECT_OK(manager.call(op, &args));
    EXPECT_OK(devices::synchronize(device));
  }
  ASSERT_OK(registry.unregister_op("test::five", "vendor.far"));
  ASSERT_OK(devices::remove(device));
}

// ---- a call of an op of the specification, saved and replayed

TEST(Replay, ASavedCaseRunsOnAnyImplementation) {
  test::TempFolder folder;
  ASSERT_OK(environment::set("TE_FL_QUARANTINE_FILE", ""));
  ASSERT_OK(environment::set("TE_FL_VERIFY_DIR", folder / "cases"));
  ASSERT_OK(environment::set("TE_FL_VERIFY", "1"));
  OpManager& manager = OpManager::instance();
  const OpId gelu = *manager.registry().find("gelu");
  Fake wrong("vendor.wrong", *manager.registry().schema(gelu));
  wrong.desc.schema = nullptr;
  wrong.desc.priority = 900;
  wrong.run_body = [](const te_fl_context&, const void* raw) {
    const auto& args = *static_cast<const te_fl_gelu_args*>(raw);
    auto* out = reinterpret_cast<float*>(static_cast<char*>(args.output->dl.data) +
                                         args.output->dl.byte_offset);
    for (int64_t i = 0; i < args.output->dl.shape[0]; ++i) out[i * args.output->dl.strides[0]] = 42;
    return TE_FL_OK;
  };
  ASSERT_OK(manager.registry().register_op(wrong.desc, "test", "acme"));
  {
    const Tensor whole = Tensor::from_values({3, 5}, std::vector<float>(15, 0.5f)).value();
    const Tensor column = whole.slice(1, 2, 3).value();
    te_fl_gelu_args args;
    args.input = column;
    args.output = column;  // strided and in place
    ASSERT_OK(manager.call(gelu, &args));
  }
  std::string file;
  for (const auto& e : std::filesystem::directory_iterator(folder / "cases")) file = e.path();
  ASSERT_FALSE(file.empty());
  const Replay again = replay(file).value();
  EXPECT_EQ(again.impl_id, "vendor.wrong");
  EXPECT_TRUE(again.from_saved.empty());
  ASSERT_EQ(again.from_reference.size(), 1u);
  EXPECT_HAS(again.from_reference[0], "'output': 3 of 3 elements differ");
  const Replay right = replay(file, "reference.host").value();
  EXPECT_TRUE(right.from_reference.empty());
  EXPECT_EQ(right.from_saved.size(), 1u);
  EXPECT_EQ(right.compared, 1);
  EXPECT_HAS(replay(file, "default.none").status().to_string(), "cannot be run on");
  // A file truncated at any length is refused and not read past its end.
  const std::string text = test::read_file(file);
  for (size_t cut = 0; cut < text.size(); cut += 37) {
    EXPECT_FALSE(replay(folder.write("cut.call", text.substr(0, cut))).ok()) << cut;
  }
  std::string far_off = text;
  far_off.replace(far_off.find("\"data\":"), 8, "\"data\":9");
  EXPECT_FALSE(replay(folder.write("far.call", far_off)).ok());
  // A length that exceeds the file must not cause an allocation of that size.
  constexpr size_t kHead = sizeof("te-fl call 1\n") - 1 + sizeof(uint64_t);
  uint64_t length = 0;
  std::memcpy(&length, text.data() + kHead - sizeof length, sizeof length);
  std::string vast = text.substr(kHead, length);
  const size_t claim = vast.find("\"bytes\":");
  vast.replace(claim, vast.find(',', claim) - claim, "\"bytes\":4398046511104");
  length = vast.size();
  vast = text.substr(0, kHead - sizeof length) +
         std::string(reinterpret_cast<const char*>(&length), sizeof length) + vast;
  EXPECT_EQ(replay(folder.write("vast.call", vast)).status().code(), StatusCode::kDataLoss);
  ASSERT_OK(manager.registry().unregister_op("gelu", "vendor.wrong"));
  for (const char* name : {"TE_FL_VERIFY", "TE_FL_VERIFY_DIR", "TE_FL_QUARANTINE_FILE"})
    ASSERT_OK(environment::unset(name));
}

}  // namespace
}  // namespace te_fl
