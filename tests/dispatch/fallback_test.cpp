// Tests when dispatch falls back to another implementation: after TE_FL_UNSUPPORTED, or after a
// failure that the implementation itself marked clean. Any other failure goes to the caller. A lost
// device is retired, whichever function reports the loss.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/device/device_list.hpp"
#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/log.hpp"
#include "te_fl/plugins.hpp"

namespace te_fl {
namespace {

using testing::Fake;
using testing::FiveCall;

// The statuses that a scripted implementation's functions return.
struct Answers {
  te_fl_status supports = TE_FL_OK, prepare = TE_FL_OK, workspace = TE_FL_OK;
  size_t scratch = 0;
};
Answers g_answers;

te_fl_status say(const te_fl_context* ctx, te_fl_status code, const char* text) {
  if (code != TE_FL_OK && ctx->errors != nullptr) ctx->errors->write(ctx->errors->host, text);
  return code;
}

// Gives `desc` supports(), prepare() and workspace() functions that return g_answers.
void script(te_fl_op_desc& desc) {
  desc.flags &= ~uint32_t{TE_FL_OP_STATIC_SUPPORT};
  desc.supports = [](void*, const te_fl_context* ctx, const void*) {
    return say(ctx, g_answers.supports, "asking went wrong");
  };
  desc.prepare = [](void*, const te_fl_context* ctx, const void*, void** plan) {
    *plan = plan;
    return say(ctx, g_answers.prepare, "planning went wrong");
  };
  desc.destroy_plan = [](void*, void*) {};
  desc.workspace = [](void*, const te_fl_context* ctx, const void*, size_t* bytes) {
    *bytes = g_answers.scratch;
    return say(ctx, g_answers.workspace, "sizing went wrong");
  };
}

struct Point {
  const char* name;
  te_fl_status Answers::*answer;
  const char* text;
};
constexpr Point kPoints[] = {{"supports", &Answers::supports, "asking went wrong"},
                             {"prepare", &Answers::prepare, "planning went wrong"},
                             {"workspace", &Answers::workspace, "sizing went wrong"}};

class Fallback : public ::testing::Test {
 protected:
  void SetUp() override {
    g_answers = {};
    script(first.desc);
    ASSERT_OK(registry.register_op(first.desc, "tests", "acme"));
    ASSERT_OK(registry.register_op(second.desc, "tests", "acme"));
    op = *registry.find("test::five");
  }
  void TearDown() override { g_answers = {}; }
  Status call() { return manager.call(op, &five.args); }

  OpRegistry registry;
  OpManager manager{registry};
  Fake first{"default.first"}, second{"reference.second"};
  FiveCall five;
  OpId op;
};

TEST_F(Fallback, OnlyUnsupportedMovesOn) {
  int moved = 0;
  for (const Point& point : kPoints) {
    SCOPED_TRACE(point.name);
    g_answers = {};
    g_answers.*point.answer = TE_FL_UNSUPPORTED;
    ASSERT_OK(call());
    EXPECT_EQ(second.runs.load(), ++moved);
    for (const te_fl_code code : {TE_FL_INTERNAL, TE_FL_OUT_OF_MEMORY, TE_FL_DEVICE_LOST,
                                  TE_FL_TIMEOUT, TE_FL_BUSY, TE_FL_INVALID_ARGUMENT}) {
      g_answers.*point.answer = code;
      const Status failed = call();
      EXPECT_EQ(failed.code(), static_cast<StatusCode>(code)) << failed.to_string();
      EXPECT_HAS(failed.to_string(), point.text);
      EXPECT_HAS(failed.to_string(), "'default.first'");
    }
    EXPECT_EQ(second.runs.load(), moved);
    EXPECT_EQ(first.runs.load(), 0);
  }
}

TEST_F(Fallback, WhatThePluginMarkedCleanMovesOn) {
  int moved = 0;
  for (const Point& point : kPoints) {
    SCOPED_TRACE(point.name);
    g_answers = {};
    g_answers.*point.answer = TE_FL_INTERNAL | TE_FL_CLEAN;
    ASSERT_OK(call());
    EXPECT_EQ(second.runs.load(), ++moved);
  }
}

// Invalid statuses of a faulty implementation: negative numbers (in which bit 16 is set), and
// TE_FL_OK with undefined higher bits.
constexpr te_fl_status kNoStatus[] = {-1,       -12,     0x20000,
                                      0x100000, 0x30000, 0x20000 | TE_FL_UNSUPPORTED};

TEST_F(Fallback, ANumberThatIsNoStatusIsNeitherSuccessNorClean) {
  for (const Point& point : kPoints) {
    SCOPED_TRACE(point.name);
    g_answers = {};
    for (const bool strict : {false, true}) {
      PolicySettings settings;
      settings.strict = strict;
      const PolicyScope scope(settings);
      for (const te_fl_status raw : kNoStatus) {
        SCOPED_TRACE(raw);
        g_answers.*point.answer = raw;
        EXPECT_FAILS(call(), kInternal, "it answered status " + std::to_string(raw));
        EXPECT_FAILS(call(), kInternal, "'default.first'");
      }
    }
  }
  EXPECT_EQ(first.runs + second.runs, 0);
}

TEST_F(Fallback, NoFallbackAfterARunThatReturnsAnUnknownCode) {
  Fake direct("default.direct");  // dispatch calls it directly, from the cached choice
  direct.desc.priority = 1000;
  for (Fake* fake : {&first, &direct}) {
    if (fake == &direct) {
      ASSERT_OK(registry.register_op(direct.desc, "tests", "acme"));
    }
    g_answers = {};
    for (const te_fl_status raw : kNoStatus) {
      SCOPED_TRACE(raw);
      fake->run_status = raw;
      const int before = fake->runs;
      EXPECT_FAILS(call(), kInternal, "it answered status " + std::to_string(raw));
      EXPECT_EQ(fake->runs.load(), before + 1);
    }
    fake->run_status = TE_FL_OK;
  }
  EXPECT_EQ(second.runs.load(), 0) << "it would run on a half-written output";
}

TEST_F(Fallback, SuccessThatIsMarkedCleanIsSuccess) {
  g_answers = {TE_FL_OK | TE_FL_CLEAN, TE_FL_OK | TE_FL_CLEAN, TE_FL_OK | TE_FL_CLEAN};
  first.run_status = TE_FL_OK | TE_FL_CLEAN;
  plugins::take_status_misuse();
  ASSERT_OK(call());
  EXPECT_EQ(first.runs.load(), 1);
  EXPECT_EQ(second.runs.load(), 0);
  EXPECT_HAS(plugins::take_status_misuse(), "TE_FL_OK marked with TE_FL_CLEAN");
  EXPECT_EQ(plugins::take_status_misuse(), "");
}

TEST_F(Fallback, AnExceptionIsNoRefusal) {
  first.desc.impl_id = "default.throws";
  first.desc.priority = 1000;
  first.desc.supports = [](void*, const te_fl_context*, const void*) -> te_fl_status {
    throw std::runtime_error("boom");
  };
  ASSERT_OK(registry.register_op(first.desc, "tests", "acme"));
  EXPECT_FAILS(call(), kInternal, "boom");
  EXPECT_EQ(second.runs.load(), 0);
}

TEST_F(Fallback, TheWarmWayAgrees) {
  // Without plan and scratch, run() directly follows supports().
  Fake direct("default.direct");
  direct.desc.priority = 1000;
  direct.with_supports();
  ASSERT_OK(registry.register_op(direct.desc, "tests", "acme"));
  ASSERT_OK(call());
  ASSERT_OK(call());
  direct.supports_status = TE_FL_INTERNAL;
  direct.supports_text = "asking went wrong";
  Tensor elsewhere = Tensor::zeros({2, 3}, DType::kF32).value();
  five.args.out = elsewhere;  // supports() has accepted these arguments, so it is not called again
  const int before = direct.runs;
  EXPECT_FAILS(call(), kInternal, "asking went wrong");
  EXPECT_EQ(direct.runs.load(), before);
  EXPECT_EQ(first.runs.load() + second.runs.load(), 0);
  direct.supports_status = TE_FL_UNSUPPORTED;
  ASSERT_OK(call());
  EXPECT_EQ(first.runs.load(), 1);
}

TEST_F(Fallback, ScratchThatIsNotThereIsAnError) {
  g_answers.scratch = SIZE_MAX - 10;
  EXPECT_FAILS(call(), kOutOfMemory, "workspace of 18446744073709551605 bytes");
  EXPECT_FAILS(call(), kOutOfMemory, "'default.first'");
  EXPECT_EQ(second.runs.load(), 0) << "another rank, with more memory, would get other bits";
}

TEST_F(Fallback, QuestionsAboutACallEndLikeTheCall) {
  g_answers.supports = TE_FL_INTERNAL;
  EXPECT_FAILS(manager.prepare(op, &five.args).status(), kInternal, "asking went wrong");
  EXPECT_FAILS(manager.resolve(op, &five.args).status(), kInternal, "asking went wrong");
  EXPECT_FAILS(manager.saved_bytes(op, &five.args).status(), kInternal, "asking went wrong");
  EXPECT_FAILS(manager.first_choice(op, &five.args).status(), kInternal, "asking went wrong");
  g_answers.supports = TE_FL_UNSUPPORTED;
  EXPECT_OK(manager.prepare(op, &five.args));
  EXPECT_EQ(manager.resolve(op, &five.args)->impl_id, "reference.second");
  EXPECT_OK(manager.saved_bytes(op, &five.args));
  EXPECT_EQ(manager.first_choice(op, &five.args)->impl_id, nullptr);
}

std::string logged_by(const std::function<void()>& f) {
  const log::Level before = log::level();
  log::set_level(log::Level::kInfo);
  ::testing::internal::CaptureStderr();
  f();
  log::set_level(before);
  return ::testing::internal::GetCapturedStderr();
}

// Returns the schema of an op that no other test uses, since each op's warning is logged once per
// process.
const te_fl_op_schema& schema_named(const char* name) {
  static std::map<std::string, te_fl_op_schema>* const all =
      new std::map<std::string, te_fl_op_schema>;
  te_fl_op_schema& s = all->emplace(name, testing::five_schema()).first->second;
  s.name = all->find(name)->first.c_str();
  return s;
}

TEST_F(Fallback, TheFirstOneOfEachOpIsLogged) {
  const te_fl_op_schema& schema = schema_named("test::falls_back");
  Fake a("default.a", schema), b("reference.b", schema);
  a.with_supports().supports_status = TE_FL_UNSUPPORTED;
  a.supports_text = "odd sizes are not supported";
  ASSERT_OK(registry.register_op(a.desc, "tests", "acme"));
  ASSERT_OK(registry.register_op(b.desc, "tests", "acme"));
  const std::string text = logged_by([&] {
    ASSERT_OK(manager.call("test::falls_back", &five.args));
    ASSERT_OK(manager.call("test::falls_back", &five.args));
  });
  const std::string line =
      "op 'test::falls_back' fell back from 'default.a' to 'reference.b': odd sizes are not "
      "supported";
  EXPECT_HAS(text, line);
  EXPECT_EQ(text.find(line), text.rfind(line)) << text;
  EXPECT_EQ(b.runs.load(), 2);
}

TEST_F(Fallback, AFailureThatWasMarkedCleanIsAWarning) {
  const te_fl_op_schema& schema = schema_named("test::falls_back_broken");
  Fake a("default.a", schema), b("reference.b", schema);
  a.run_status = TE_FL_INTERNAL | TE_FL_CLEAN;
  a.run_text = "the kernel was not there";
  ASSERT_OK(registry.register_op(a.desc, "tests", "acme"));
  ASSERT_OK(registry.register_op(b.desc, "tests", "acme"));
  const std::string text =
      logged_by([&] { ASSERT_OK(manager.call("test::falls_back_broken", &five.args)); });
  EXPECT_HAS(text,
             "warning: op 'test::falls_back_broken' fell back from 'default.a' to "
             "'reference.b': the kernel was not there");
}

// ---- on a device

// A fake device: host memory under another name. Its functions fail on demand.
struct Failing {
  te_fl_status allocate = TE_FL_OK, free = TE_FL_OK, capturing = TE_FL_OK, properties = TE_FL_OK,
               destroy = TE_FL_OK, copy = TE_FL_OK;
  int failing_copies = 0;   // so many of the next copies return the status `copy`
  int refused_streams = 0;  // the next check_stream() calls that return an error
  te_fl_status capturing_once = TE_FL_OK;
  te_fl_device_api api{};
  te_fl_device_desc desc{};

  static Failing& of(void* self) { return *static_cast<Failing*>(self); }
  static te_fl_status tell(te_fl_status code, const te_fl_error_sink* errors) {
    if (code != TE_FL_OK && errors != nullptr) errors->write(errors->host, "the chip says so");
    return code;
  }
  Failing() {
    api.struct_size = sizeof api;
    api.allocate = [](void* self, const te_fl_memory_desc* memory, void** out,
                      const te_fl_error_sink* e) {
      if (memory->kind != TE_FL_MEMORY_DEVICE) return te_fl_status{TE_FL_UNSUPPORTED};
      const size_t bytes = memory->bytes;
      if (of(self).allocate != TE_FL_OK) return tell(of(self).allocate, e);
      *out = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
      return te_fl_status{TE_FL_OK};
    };
    api.free = [](void* self, void* data, uint32_t, void*, const te_fl_error_sink* e) {
      std::free(data);
      return tell(of(self).free, e);
    };
    api.copy = [](void* self, void* dst, const void* src, size_t bytes, uint32_t, void*,
                  const te_fl_error_sink* e) {
      if (of(self).failing_copies > 0) {
        --of(self).failing_copies;
        return tell(of(self).copy, e);
      }
      std::memcpy(dst, src, bytes);
      return te_fl_status{TE_FL_OK};
    };
    api.fill = [](void*, void* dst, uint8_t value, size_t bytes, void*, const te_fl_error_sink*) {
      std::memset(dst, value, bytes);
      return te_fl_status{TE_FL_OK};
    };
    api.synchronize = [](void*, void*, const te_fl_error_sink*) { return te_fl_status{TE_FL_OK}; };
    api.create_event = [](void*, uint32_t, void** event, const te_fl_error_sink*) {
      *event = event;
      return te_fl_status{TE_FL_OK};
    };
    api.destroy_event = [](void* self, void*, const te_fl_error_sink* e) {
      return tell(of(self).destroy, e);
    };
    api.is_capturing = [](void* self, void*, int32_t* capturing, const te_fl_error_sink* e) {
      *capturing = 0;
      if (of(self).refused_streams > 0) return te_fl_status{TE_FL_INVALID_ARGUMENT};
      if (const te_fl_status once = std::exchange(of(self).capturing_once, TE_FL_OK)) return once;
      return tell(of(self).capturing, e);
    };
    api.check_stream = [](void* self, void*, const te_fl_error_sink* e) {
      return of(self).refused_streams-- > 0 ? tell(TE_FL_INVALID_ARGUMENT, e)
                                            : te_fl_status{TE_FL_OK};
    };
    api.properties = [](void* self, te_fl_device_props* props, const te_fl_error_sink* e) {
      props->arch = 80;
      return tell(of(self).properties, e);
    };
    desc.struct_size = sizeof desc;
    desc.device = {TE_FL_DEVICE_EXT, 0};
    desc.provider = "failing";
    desc.self = this;
    desc.api = &api;
  }
};

class FallbackOnDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    g_answers = {};
    device = devices::add(&chip.desc).value();
    script(native.desc);
    native.desc.device_types = uint64_t{1} << TE_FL_DEVICE_EXT;
    native.desc.provider = other.desc.provider = "failing";
    other.desc.device_types = native.desc.device_types;
    for (Fake* f : {&native, &other, &host})
      ASSERT_OK(registry.register_op(f->desc, "tests", "acme"));
    for (Tensor& t : tensors) t = Tensor::zeros({2, 3}, DType::kF32, device).value();
    args.a = tensors[0];
    args.b = tensors[1];
    args.c = tensors[2];
    args.d = tensors[3];
    args.out = tensors[4];
  }
  void TearDown() override {
    g_answers = {};
    restore();
    for (Tensor& t : tensors) t = Tensor();
    ASSERT_OK(devices::remove(device));
  }
  // Marks the device as usable again, as a restart of the process would.
  void restore() { core::g_device_hooks.on_added.load()(device); }
  Status call() { return manager.call("test::five", &args); }
  void expect_lost(const char* since) {
    const int before = native.runs + other.runs + host.runs;
    EXPECT_FAILS(call(), kDeviceLost, "device ext:failing:0 is lost since");
    EXPECT_FAILS(call(), kDeviceLost, since);
    EXPECT_FAILS(devices::synchronize(device), kDeviceLost, since);
    EXPECT_EQ(native.runs + other.runs + host.runs, before);
    restore();
  }

  Failing chip;
  Device device;
  OpRegistry registry;
  OpManager manager{registry};
  Fake native{"vendor.native"}, other{"vendor.other"}, host{"reference.host"};
  Tensor tensors[5];
  testing::FiveArgs args;
};

TEST_F(FallbackOnDevice, ALostDeviceIsRetiredWhicheverEntryReportsIt) {
  int64_t columns = 100;
  for (const Point& point : kPoints) {
    for (const te_fl_status code :
         {te_fl_status{TE_FL_DEVICE_LOST}, te_fl_status{TE_FL_DEVICE_LOST | TE_FL_CLEAN}}) {
      SCOPED_TRACE(point.name);
      ASSERT_OK(call());
      g_answers.*point.answer = code;
      // Uses a new shape, because dispatch calls prepare() only if no plan exists, and supports()
      // only for a call that it has not accepted before.
      if (point.answer == &Answers::prepare || point.answer == &Answers::supports) {
        ++columns;
        for (Tensor& t : tensors) t = Tensor::zeros({3, columns}, DType::kF32, device).value();
        args = {
            .a = tensors[0], .b = tensors[1], .c = tensors[2], .d = tensors[3], .out = tensors[4]};
      }
      EXPECT_FAILS(call(), kDeviceLost, point.text);
      g_answers = {};
      expect_lost(point.text);
    }
  }
  EXPECT_EQ(other.runs.load(), 0);
  EXPECT_EQ(host.runs.load(), 0);
}

TEST_F(FallbackOnDevice, ALostDeviceIsRetiredWhenAQuestionMeetsIt) {
  const OpId op = *registry.find("test::five");
  g_answers.supports = TE_FL_DEVICE_LOST;
  EXPECT_FAILS(manager.resolve(op, &args).status(), kDeviceLost, "asking went wrong");
  g_answers = {};
  expect_lost("asking went wrong");
  g_answers.supports = TE_FL_DEVICE_LOST;
  EXPECT_FAILS(manager.first_choice(op, &args).status(), kDeviceLost, "asking went wrong");
  g_answers = {};
  expect_lost("asking went wrong");
}

TEST_F(FallbackOnDevice, ALostDeviceIsRetiredByEveryFunctionOfIts) {
  ASSERT_OK(call());
  chip.capturing = TE_FL_DEVICE_LOST;
  EXPECT_FAILS(call(), kDeviceLost, "the chip says so");
  chip.capturing = TE_FL_OK;
  expect_lost("the chip says so");

  chip.capturing = TE_FL_DEVICE_LOST;
  EXPECT_FAILS(devices::is_capturing(device).status(), kDeviceLost, "the chip says so");
  chip.capturing = TE_FL_OK;
  expect_lost("the chip says so");

  chip.properties = TE_FL_DEVICE_LOST;
  EXPECT_FAILS(devices::properties(device).status(), kDeviceLost, "the chip says so");
  chip.properties = TE_FL_OK;
  expect_lost("the chip says so");

  void* const block = devices::allocate(device, 64).value();
  chip.free = TE_FL_DEVICE_LOST;
  devices::free(device, block);
  chip.free = TE_FL_OK;
  expect_lost("the chip says so");

  void* const event = devices::create_event(device).value();
  chip.destroy = TE_FL_DEVICE_LOST;
  devices::destroy_event(device, event);
  chip.destroy = TE_FL_OK;
  expect_lost("the chip says so");
}

TEST_F(FallbackOnDevice, AStreamThatCannotBeQueriedStopsTheCall) {
  ASSERT_OK(call());
  const int before = native.runs;
  chip.capturing = TE_FL_INTERNAL;
  EXPECT_FAILS(call(), kInternal, "op 'test::five'");
  EXPECT_FAILS(call(), kInternal, "the chip says so");
  EXPECT_EQ(native.runs.load(), before) << "it may be in a capture, and was run as if it were not";
  chip.capturing = TE_FL_UNSUPPORTED;  // a device without captures
  ASSERT_OK(call());
  chip.capturing = TE_FL_OK;
  ASSERT_OK(call());
}

TEST_F(FallbackOnDevice, ADeviceThatAnswersANumberHasFailed) {
  for (const te_fl_status raw : kNoStatus) {
    SCOPED_TRACE(raw);
    const std::string words = "it answered status " + std::to_string(raw);
    chip.capturing = raw;
    EXPECT_FAILS(call(), kInternal, words);
    EXPECT_FAILS(devices::is_capturing(device).status(), kInternal, words);
    chip.capturing = TE_FL_OK;
    chip.allocate = raw;
    EXPECT_FAILS(devices::allocate(device, 64).status(), kInternal, words);
    chip.allocate = TE_FL_OK;
    chip.properties = raw;
    EXPECT_FAILS(devices::properties(device).status(), kInternal, words);
    chip.properties = TE_FL_OK;
  }
  EXPECT_EQ(native.runs + other.runs + host.runs, 0);
  chip.capturing = TE_FL_OK | TE_FL_CLEAN;
  ASSERT_OK(call());
  chip.capturing = TE_FL_OK;
}

TEST_F(FallbackOnDevice, ACallThatIsInOrderAtTheSecondLookRuns) {
  int stream = 0;
  CallOptions options;
  options.stream = &stream;
  const OpId op = *registry.find("test::five");
  const PreparedOp handle = manager.prepare(op, &args).value();
  for (const auto& run : {std::function([&] { return manager.call(op, &args, options); }),
                          std::function([&] { return handle.call(&args, options); })}) {
    int before = native.runs;
    chip.refused_streams = 1;
    const Status status = run();
    chip.refused_streams = 0;
    EXPECT_EQ(status.ok(), native.runs == before + 1) << "OK, and nothing ran";
    before = native.runs;
    chip.capturing_once = TE_FL_INTERNAL;
    ASSERT_OK(run());
    EXPECT_EQ(native.runs.load(), before + 1);
  }
}

TEST_F(FallbackOnDevice, ScratchThatTheDeviceDoesNotHaveIsAnError) {
  g_answers.scratch = 4096;
  for (const te_fl_status code :
       {te_fl_status{TE_FL_OUT_OF_MEMORY}, te_fl_status{TE_FL_OUT_OF_MEMORY | TE_FL_CLEAN},
        te_fl_status{TE_FL_UNSUPPORTED}}) {
    chip.allocate = code;
    const Status failed = call();
    EXPECT_FALSE(failed.ok());
    EXPECT_HAS(failed.to_string(), "the chip says so");
    EXPECT_HAS(failed.to_string(), "'vendor.native'");
  }
  EXPECT_EQ(native.runs + other.runs + host.runs, 0)
      << "a rank with more memory would compute other bits";
  chip.allocate = TE_FL_OK;
  ASSERT_OK(call());
}

TEST_F(FallbackOnDevice, CopiesThatFailAreNoReasonToCopyForAnother) {
  Fake second("reference.second");
  ASSERT_OK(registry.register_op(second.desc, "tests", "acme"));
  PolicySettings staged;
  staged.per_op["test::five"] = {{PolicyToken::Type::kImpl, Kind::kReference, "reference.host"},
                                 {PolicyToken::Type::kImpl, Kind::kReference, "reference.second"}};
  const PolicyScope scope(staged);
  ASSERT_OK(call());
  EXPECT_EQ(host.runs.load(), 1);
  for (const te_fl_status code :
       {te_fl_status{TE_FL_INTERNAL | TE_FL_CLEAN}, te_fl_status{TE_FL_OUT_OF_MEMORY | TE_FL_CLEAN},
        te_fl_status{TE_FL_UNSUPPORTED}}) {
    chip.copy = code;
    chip.failing_copies = 1;
    const Status failed = call();
    EXPECT_FALSE(failed.ok());
    EXPECT_HAS(failed.to_string(), "the chip says so");
  }
  EXPECT_EQ(second.runs.load(), 0);
}

}  // namespace
}  // namespace te_fl
