// Tests a forward's saved record, and which implementations may run the backward that reads the
// record.
#include <gtest/gtest.h>

#include "op_manager_fixture.hpp"

namespace te_fl {
namespace {

using testing::Fake;
using testing::prefer;
using testing::save_schema;
using testing::SaveArgs;

// An op pair whose forward saves a record for the backward.
class Saved : public ::testing::Test {
 protected:
  void SetUp() override {
    for (Fake* f : {&fwd_a, &fwd_b, &bwd_a, &bwd_b})
      ASSERT_OK(registry.register_op(f->desc, f->desc.impl_id, "acme"));
    x = Tensor::zeros({4}, DType::kF32).value();
    y = Tensor::zeros({4}, DType::kF32).value();
    args.x = x;
    args.y = y;
    args.saved = &record;
  }
  OpRegistry registry;
  OpManager manager{registry};
  Fake fwd_a{"default.a", save_schema(true)}, fwd_b{"vendor.b", save_schema(true)};
  Fake bwd_a{"default.a", save_schema(false)}, bwd_b{"vendor.b", save_schema(false)};
  Tensor x, y;
  te_fl_saved record;
  SaveArgs args;
};

TEST_F(Saved, AnOpaqueRecordBindsTheBackwardToItsProducer) {
  fwd_b.run_body = [&](const te_fl_context&, const void* raw) -> te_fl_status {
    static_cast<const SaveArgs*>(raw)->saved->opaque = 1;
    return TE_FL_OK;
  };
  {
    const PolicyScope scope(prefer(Kind::kVendor));
    ASSERT_OK(manager.call("test::save_fwd", &args));
  }
  EXPECT_EQ(record.opaque, 1u);
  ASSERT_STREQ(record.producer, "vendor.b");
  PolicySettings denied;
  denied.deny_vendors = {"acme"};
  const PolicyScope scope(denied);
  ASSERT_OK(manager.call("test::save_bwd", &args));
  EXPECT_EQ(bwd_b.runs.load(), 1);
  EXPECT_EQ(bwd_a.runs.load(), 0);
  ASSERT_OK(registry.unregister_op("test::save_bwd", "vendor.b"));
  EXPECT_FAILS(manager.call("test::save_bwd", &args), kFailedPrecondition, "'vendor.b'");
  EXPECT_EQ(bwd_a.runs.load(), 0);
}

TEST_F(Saved, ARecordOfFixedFormatBindsNoImplementation) {
  record.opaque = 1;  // a stale value from an earlier use of the record
  ASSERT_OK(manager.call("test::save_fwd", &args));
  EXPECT_EQ(record.opaque, 0u);
  EXPECT_STREQ(record.producer, "default.a");
  const PolicyScope scope(prefer(Kind::kVendor));
  ASSERT_OK(manager.call("test::save_bwd", &args));
  EXPECT_EQ(bwd_b.runs.load(), 1);
}

TEST_F(Saved, AProducerThatCannotIsAnError) {
  record.opaque = 1;
  EXPECT_FAILS(manager.call("test::save_bwd", &args), kInvalidArgument, "producer");
  record.producer = "vendor.b";
  bwd_b.run_status = TE_FL_UNSUPPORTED;
  bwd_b.run_text = "not this shape";
  EXPECT_FAILS(manager.call("test::save_bwd", &args), kUnsupported, "not this shape");
  EXPECT_EQ(bwd_a.runs.load(), 0);
}

TEST_F(Saved, SavedBytesAsksTheChosenOne) {
  ASSERT_OK(manager.saved_bytes(*registry.find("test::save_fwd"), &args));
  EXPECT_EQ(*manager.saved_bytes(*registry.find("test::save_fwd"), &args), 0u);
  fwd_b.desc.saved_bytes = [](void*, const te_fl_context*, const void*,
                              size_t* bytes) -> te_fl_status {
    *bytes = 77;
    return TE_FL_OK;
  };
  ASSERT_OK(registry.unregister_op("test::save_fwd", "vendor.b"));
  ASSERT_OK(registry.register_op(fwd_b.desc, "tests", "acme"));
  const PolicyScope scope(prefer(Kind::kVendor));
  EXPECT_EQ(*manager.saved_bytes(*registry.find("test::save_fwd"), &args), 77u);
}

}  // namespace
}  // namespace te_fl
