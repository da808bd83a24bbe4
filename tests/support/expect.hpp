// Expectations on a Status, a Result, an op's Outcome or a text. A failure prints the expression,
// the code and the whole text with its causes; << adds more.
//
//   ASSERT_OK(x), EXPECT_OK(x)          x.ok(), or an Outcome of TE_FL_OK
//   EXPECT_FAILS(x, kBusy, part)        the code is StatusCode::kBusy and the text contains `part`
//   EXPECT_REFUSED(x, part, ...)        TE_FL_INVALID_ARGUMENT, clean; the text contains all parts
//   EXPECT_HAS(text, part), EXPECT_LACKS(text, part)
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <string_view>

#include "support/outcome.hpp"
#include "te_fl/status.hpp"

namespace te_fl::testing {

inline bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

inline Status status_of(const Status& status) { return status; }
inline Status status_of(const Outcome& o) { return Status::from_c(o.status, o.text); }
template <class T>
Status status_of(const Result<T>& result) {
  return result.status();
}

// Returns the error text of `answer`, which is a Status, a Result, an Outcome, or another type with
// ok() and to_string() or `error`.
template <class T>
std::string answer_text(const T& answer) {
  if constexpr (requires { status_of(answer); }) {
    return status_of(answer).to_string();
  } else if constexpr (requires { answer.to_string(); }) {
    return answer.to_string();
  } else {
    return answer.error;
  }
}

template <class T>
::testing::AssertionResult is_ok(const char* expression, const T& answer) {
  bool ok;
  if constexpr (requires { answer.ok(); }) {
    ok = answer.ok();
  } else {
    ok = status_of(answer).ok();
  }
  if (ok) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << expression << " is " << answer_text(answer);
}

inline ::testing::AssertionResult says(const char* expression, const Status& status,
                                       std::initializer_list<std::string_view> parts) {
  for (const std::string_view part : parts) {
    if (!contains(status.to_string(), part)) {
      return ::testing::AssertionFailure()
             << expression << " does not say '" << part << "' but: " << status.to_string();
    }
  }
  return ::testing::AssertionSuccess();
}

template <class T>
::testing::AssertionResult fails(const char* expression, const char*, const char*, const T& answer,
                                 StatusCode code, std::string_view part) {
  const Status status = status_of(answer);
  if (status.code() != code) {
    return ::testing::AssertionFailure()
           << expression << " is not " << to_string(code) << " but " << status.to_string();
  }
  return says(expression, status, {part});
}

template <class T>
::testing::AssertionResult refused(const char* expression, const char*, const T& answer,
                                   std::initializer_list<std::string_view> parts) {
  const Status status = status_of(answer);
  if (status.code() != StatusCode::kInvalidArgument || !status.clean()) {
    return ::testing::AssertionFailure()
           << expression << " is not a clean INVALID_ARGUMENT but "
           << (status.ok() || status.clean() ? "" : "(not clean) ") << status.to_string();
  }
  return says(expression, status, parts);
}

inline ::testing::AssertionResult has(const char* expression, const char*, std::string_view text,
                                      std::string_view part) {
  if (contains(text, part)) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "'" << part << "' is not in " << expression << ": " << text;
}

inline ::testing::AssertionResult lacks(const char* expression, const char*, std::string_view text,
                                        std::string_view part) {
  if (!contains(text, part)) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "'" << part << "' is in " << expression << ": " << text;
}

}  // namespace te_fl::testing

#define ASSERT_OK(answer) ASSERT_PRED_FORMAT1(::te_fl::testing::is_ok, answer)
#define EXPECT_OK(answer) EXPECT_PRED_FORMAT1(::te_fl::testing::is_ok, answer)
#define EXPECT_FAILS(answer, expected_code, part) \
  EXPECT_PRED_FORMAT3(::te_fl::testing::fails, answer, ::te_fl::StatusCode::expected_code, part)
#define EXPECT_REFUSED(answer, ...)                      \
  EXPECT_PRED_FORMAT2(::te_fl::testing::refused, answer, \
                      (std::initializer_list<std::string_view>{__VA_ARGS__}))
#define EXPECT_HAS(text, part) EXPECT_PRED_FORMAT2(::te_fl::testing::has, text, part)
#define EXPECT_LACKS(text, part) EXPECT_PRED_FORMAT2(::te_fl::testing::lacks, text, part)
