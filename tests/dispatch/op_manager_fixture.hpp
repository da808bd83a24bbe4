// Fixture: an OpManager with three implementations of one op, and policies for it.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "te_fl/op_manager.hpp"

namespace te_fl::testing {

inline PolicySettings prefer(Kind kind) {
  PolicySettings s;
  s.prefer = kind;
  return s;
}

inline PolicySettings strict() {
  PolicySettings s;
  s.strict = true;
  return s;
}

inline PolicySettings list(std::vector<PolicyToken> tokens) {
  PolicySettings s;
  s.per_op["test::five"] = std::move(tokens);
  return s;
}

inline PolicyToken impl(std::string id) {
  return {PolicyToken::Type::kImpl, Kind::kDefault, std::move(id)};
}

// Three implementations of test::five: a reference, a default and a vendor one.
class Dispatch : public ::testing::Test {
 protected:
  void SetUp() override {
    for (Fake* f : {&portable, &vendor, &reference})
      ASSERT_OK(registry.register_op(f->desc, "tests", "acme"));
    op = *registry.find("test::five");
  }
  Status call() { return manager.call(op, &five.args); }
  // Returns the implementations that have run since the last call of ran(): "default vendor", ...
  std::string ran() {
    std::string text;
    for (Fake* f : {&portable, &vendor, &reference}) {
      for (int n = f->runs.exchange(0); n > 0; --n)
        text += (text.empty() ? "" : " ") + std::string(f->desc.impl_id);
    }
    return text;
  }
  void reregister(Fake& f) {
    ASSERT_OK(registry.unregister_op("test::five", f.desc.impl_id));
    ASSERT_OK(registry.register_op(f.desc, "tests", "acme"));
  }

  OpRegistry registry;
  OpManager manager{registry};
  Fake portable{"default.p"}, vendor{"vendor.v"}, reference{"reference.r"};
  FiveCall five;
  OpId op;
};

}  // namespace te_fl::testing
