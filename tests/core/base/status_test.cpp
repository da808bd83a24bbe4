#include "te_fl/status.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "core/base/error_text.hpp"

namespace te_fl {
namespace {

TEST(Status, OkHasNoTextAndNoCause) {
  const Status ok;
  EXPECT_TRUE(ok.ok());
  EXPECT_EQ(ok.code(), StatusCode::kOk);
  EXPECT_EQ(ok.message(), "");
  EXPECT_TRUE(ok.cause().ok());
  EXPECT_FALSE(ok.clean());
  EXPECT_EQ(ok.to_c(), TE_FL_OK);
  EXPECT_EQ(ok.to_string(), "OK");
  EXPECT_TRUE(Status(StatusCode::kOk, "text of an OK status is dropped").ok());
}

TEST(Status, WrapKeepsCodeAndCleanness) {
  const Status inner = invalid_argument("extent -1 is negative");
  const Status outer = inner.wrap("gelu").wrap("layer 3");
  EXPECT_EQ(outer.code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(outer.clean());
  EXPECT_EQ(outer.cause().message(), "gelu");
  EXPECT_EQ(outer.to_string(),
            "INVALID_ARGUMENT: layer 3\n  caused by: gelu\n  caused by: extent -1 is negative");
  EXPECT_FALSE(internal_error("x").wrap("y").clean());
  EXPECT_TRUE(Status().wrap("nothing happened").ok());
}

TEST(Status, ACauseOfAnotherCodeSaysIt) {
  const Status s(StatusCode::kIncompatible, "plugin refused", not_found("libfoo.so.1"));
  EXPECT_EQ(s.to_string(), "INCOMPATIBLE: plugin refused\n  caused by: NOT_FOUND: libfoo.so.1");
}

TEST(Status, SetCleanLeavesCopiesAlone) {
  Status a(StatusCode::kInternal, "broken");
  const Status b = a;
  a.set_clean();
  EXPECT_TRUE(a.clean());
  EXPECT_FALSE(b.clean());
  EXPECT_EQ(a.to_c(), TE_FL_INTERNAL | TE_FL_CLEAN);
}

TEST(Status, UnsupportedIsAlwaysClean) {
  EXPECT_TRUE(Status(StatusCode::kUnsupported, "no").clean());
  EXPECT_TRUE(Status::from_c(TE_FL_UNSUPPORTED, "no").clean());
}

TEST(Status, EveryCodeSurvivesTheAbi) {
  for (int code = 1; code <= TE_FL_INTERNAL; ++code) {
    const Status s = Status::from_c(code | TE_FL_CLEAN, "text");
    EXPECT_EQ(static_cast<int>(s.code()), code);
    EXPECT_EQ(s.to_c(), code | TE_FL_CLEAN);
    EXPECT_NE(to_string(s.code()), "UNKNOWN");
  }
  EXPECT_TRUE(Status::from_c(TE_FL_OK, "ignored").ok());
}

TEST(Status, AnUnknownCodeIsInternalAndSaysSo) {
  const Status s = Status::from_c(99, "plugin text");
  EXPECT_EQ(s.code(), StatusCode::kInternal);
  EXPECT_EQ(s.message(),
            "plugin text (it answered status 99 (0x63), which is no te_fl_code, with or without "
            "TE_FL_CLEAN (rules R6, R20))");
  EXPECT_FALSE(s.clean());
  EXPECT_TRUE(Status::from_c(99 | TE_FL_CLEAN, "").clean()) << "a later code, marked";
}

// A status with undefined bits is neither success nor clean.
TEST(Status, BitsWithoutAMeaningMakeItInternalAndNotClean) {
  for (const te_fl_status raw :
       {te_fl_status{-1}, te_fl_status{-12}, te_fl_status{0x20000}, te_fl_status{0x100000},
        te_fl_status{0x30000}, te_fl_status{0x20000 | TE_FL_UNSUPPORTED}, te_fl_status{INT32_MIN},
        te_fl_status{INT32_MIN | TE_FL_CLEAN | TE_FL_BUSY}}) {
    SCOPED_TRACE(raw);
    const Status s = Status::from_c(raw, "plugin text");
    EXPECT_EQ(s.code(), StatusCode::kInternal);
    EXPECT_FALSE(s.clean());
    EXPECT_NE(s.message().find("status " + std::to_string(raw) + " (0x"), std::string::npos);
    core::ErrorText errors;
    EXPECT_EQ(errors.call([&] { return raw; }), TE_FL_INTERNAL);
    EXPECT_NE(errors.text().find(std::to_string(raw)), std::string::npos) << errors.text();
  }
  EXPECT_TRUE(Status::from_c(TE_FL_OK | TE_FL_CLEAN, "ignored").ok());
  core::ErrorText errors;
  EXPECT_EQ(errors.call([] { return te_fl_status{TE_FL_OK | TE_FL_CLEAN}; }), TE_FL_OK);
  EXPECT_EQ(errors.text(), "");
  EXPECT_EQ(errors.call([] { return te_fl_status{TE_FL_BUSY | TE_FL_CLEAN}; }),
            TE_FL_BUSY | TE_FL_CLEAN);
}

TEST(Result, HoldsAValueOrAStatus) {
  const Result<int> good = 7;
  ASSERT_TRUE(good.ok());
  EXPECT_EQ(*good, 7);
  const Result<int> bad = not_found("nothing");
  EXPECT_FALSE(bad.ok());
  EXPECT_EQ(bad.status().message(), "nothing");
  EXPECT_EQ(Result<int>(Status()).status().code(), StatusCode::kInternal);
}

TEST(ResultDeathTest, ValueOfAnErrorAbortsWithTheStatus) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const Result<int> bad = not_found("nothing here");
  EXPECT_DEATH((void)bad.value(), "NOT_FOUND: nothing here");
}

TEST(ErrorText, CollectsCauses) {
  core::ErrorText errors;
  errors.sink()->write(errors.sink()->host, "first");
  errors.sink()->write(errors.sink()->host, "second");
  errors.sink()->write(errors.sink()->host, nullptr);
  const Status s = errors.status(TE_FL_OUT_OF_MEMORY, "allocation");
  EXPECT_EQ(s.code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(s.message(), "allocation: first\n  caused by: second");
  EXPECT_TRUE(errors.status(TE_FL_OK, "allocation").ok());
  EXPECT_EQ(core::ErrorText().status(TE_FL_BUSY, "stop").message(), "stop failed");
}

}  // namespace
}  // namespace te_fl
