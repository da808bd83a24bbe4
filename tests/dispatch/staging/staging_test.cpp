// Staging runs host implementations on host copies of a device's tensors, if only the device can
// access its memory. Tests the copies to the host and back.
#include "staging_fixture.hpp"

namespace te_fl {
namespace {

using testing::Fake;
using testing::FiveArgs;
using testing::SaveArgs;
using testing::Staging;

TEST_F(Staging, CopiesInputsThereAndOutputsBack) {
  add(host);
  FiveArgs args = five();
  host.run_body = [&](const te_fl_context& ctx, const void* raw) -> te_fl_status {
    const auto& seen = *static_cast<const FiveArgs*>(raw);
    EXPECT_EQ(ctx.device.type, TE_FL_DEVICE_CPU);
    EXPECT_EQ(ctx.stream, nullptr);
    EXPECT_EQ(seen.a->dl.device.type, TE_FL_DEVICE_CPU);
    EXPECT_EQ(seen.a->provider, 0u);
    for (const te_fl_tensor* t : {seen.a, seen.b, seen.c, seen.d, seen.out}) {
      EXPECT_FALSE(far.owns(t->dl.data));
    }
    return sum(ctx, raw);
  };
  ASSERT_OK(call(args));
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(at(kept[4], i), 1110 + 4 * static_cast<float>(i));
  EXPECT_EQ(far.reads().size(), 4u);  // outputs are not copied in
  ASSERT_EQ(far.writes().size(), 1u);
  EXPECT_EQ(far.writes()[0].begin, reinterpret_cast<uintptr_t>(kept[4].raw_data()));
  EXPECT_EQ(far.writes()[0].bytes, 16u);
}

TEST_F(Staging, FollowsTheCallsStreamAndNoOther) {
  add(host);
  const FiveArgs args = five();
  int mine = 0, other = 0;
  bool other_done = false;
  far.enqueue(&mine, [&] { std::memset(far.real(kept[0].raw_data()), 0, 16); });
  far.enqueue(&other, [&] { other_done = true; });
  ASSERT_OK(call(args, &mine));
  EXPECT_EQ(at(kept[4], 3), 1110 + 9);  // earlier work on the stream has zeroed a
  EXPECT_FALSE(other_done);
  for (const auto& r : far.reads()) EXPECT_EQ(r.stream, &mine);
  for (const auto& w : far.writes()) EXPECT_EQ(w.stream, &mine);
}

TEST_F(Staging, AliasingSurvives) {
  add(host);
  FiveArgs args = five(8);
  // b starts in the middle of a, and the output is a itself.
  Tensor whole = kept[0];
  const Tensor a = whole.slice(0, 0, 6).value(), b = whole.slice(0, 2, 8).value();
  const Tensor c = kept[2].slice(0, 0, 6).value(), d = kept[3].slice(0, 0, 6).value();
  args.a = a.c(), args.b = b.c(), args.c = c.c(), args.d = d.c(), args.out = a.c();
  far.forget();
  host.run_body = [&](const te_fl_context& ctx, const void* raw) -> te_fl_status {
    const auto& seen = *static_cast<const FiveArgs*>(raw);
    EXPECT_EQ(seen.a->dl.data, seen.out->dl.data);
    EXPECT_EQ(static_cast<char*>(seen.b->dl.data) - static_cast<char*>(seen.a->dl.data), 8);
    return sum(ctx, raw);
  };
  ASSERT_OK(call(args));
  EXPECT_EQ(far.reads().size(), 3u);
  // The expected values follow host semantics: b reads elements that the loop has already written.
  std::vector<float> x = {0, 1, 2, 3, 4, 5, 6, 7};
  for (size_t i = 0; i < 6; ++i) x[i] = x[i] + x[i + 2] + 1100 + 2 * static_cast<float>(i);
  for (int64_t i = 0; i < 8; ++i) EXPECT_EQ(at(whole, i), x[static_cast<size_t>(i)]) << i;
}

TEST_F(Staging, TheGapsOfAStridedOutputAreNotWritten) {
  add(host);
  FiveArgs args = five(4);
  Tensor wide = Tensor::zeros({2, 8}, DType::kF32, device).value();
  const Tensor out = wide.slice(1, 1, 3).value();
  std::vector<Tensor> in;
  for (int i = 0; i < 4; ++i) in.push_back(kept[static_cast<size_t>(i)].view({2, 2}).value());
  args.a = in[0].c(), args.b = in[1].c(), args.c = in[2].c(), args.d = in[3].c();
  args.out = out.c();
  far.forget();
  host.run_body = [&](const te_fl_context&, const void* raw) -> te_fl_status {
    const auto& seen = *static_cast<const FiveArgs*>(raw);
    EXPECT_EQ(seen.out->dl.strides[0], 8);
    auto* y = static_cast<float*>(seen.out->dl.data);
    for (int row = 0; row < 2; ++row) {
      // Writes to the bytes between the tensors in the host copy must not reach the device.
      for (int column = 0; column < 2; ++column) y[8 * row + column] = 5;
    }
    for (int column = 2; column < 8; ++column) y[column] = 77;
    // Simulates another thread, which writes those bytes on the device.
    auto* real = reinterpret_cast<float*>(far.real(wide.raw_data()));
    for (int i = 0; i < 16; ++i) real[i] = 9;
    return TE_FL_OK;
  };
  ASSERT_OK(call(args));
  for (int64_t i = 0; i < 16; ++i) {
    EXPECT_EQ(at(wide, i), i % 8 == 1 || i % 8 == 2 ? 5 : 9) << i;
  }
  EXPECT_EQ(far.writes().size(), 2u);
  EXPECT_EQ(far.writes()[0].bytes, 8u);
  EXPECT_EQ(far.reads().size(), 4u);
}

TEST_F(Staging, AnOutputWithoutGapsIsOneCopyInAnyOrderOfItsDimensions) {
  add(host);
  FiveArgs args = five(6);
  std::vector<Tensor> in;
  for (int i = 0; i < 4; ++i) in.push_back(kept[static_cast<size_t>(i)].view({2, 3}).value());
  const Tensor out = kept[4].view({3, 2}).value().transpose(0, 1).value();
  args.a = in[0].c(), args.b = in[1].c(), args.c = in[2].c(), args.d = in[3].c();
  args.out = out.c();
  far.forget();
  host.run_body = [](const te_fl_context&, const void* raw) -> te_fl_status {
    const auto& seen = *static_cast<const FiveArgs*>(raw);
    auto* y = static_cast<float*>(seen.out->dl.data);
    for (int r = 0; r < 2; ++r) {
      for (int c = 0; c < 3; ++c)
        y[r * seen.out->dl.strides[0] + c * seen.out->dl.strides[1]] = 10.f * r + c;
    }
    return TE_FL_OK;
  };
  ASSERT_OK(call(args));
  EXPECT_EQ(far.writes().size(), 1u);
  const float expected[] = {0, 10, 1, 11, 2, 12};
  for (int64_t i = 0; i < 6; ++i) EXPECT_EQ(at(kept[4], i), expected[i]);
}

TEST_F(Staging, NegativeStridesReachBackwards) {
  add(host);
  FiveArgs args = five(4);
  int64_t shape[] = {4}, strides[] = {-1};
  te_fl_tensor a = *args.a, out = *args.out;
  for (te_fl_tensor* t : {&a, &out}) {
    t->dl.data = static_cast<char*>(t->dl.data) + 12;
    t->dl.shape = shape;
    t->dl.strides = strides;
  }
  args.a = &a, args.out = &out;
  host.run_body = [](const te_fl_context&, const void* raw) -> te_fl_status {
    const auto& seen = *static_cast<const FiveArgs*>(raw);
    for (int i = 0; i < 4; ++i)
      static_cast<float*>(seen.out->dl.data)[-i] = 2 * static_cast<float*>(seen.a->dl.data)[-i];
    return TE_FL_OK;
  };
  ASSERT_OK(call(args));
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(at(kept[4], i), 2 * static_cast<float>(i));
}

TEST_F(Staging, AScatteredOutputIsRefused) {
  add(host);
  const int64_t n = (int64_t{1} << 20) + 1;
  const Tensor in = Tensor::zeros({n}, DType::kU8, device).value();
  const Tensor wide = Tensor::zeros({n, 2}, DType::kU8, device).value();
  int64_t shape[] = {n}, strides[] = {2};
  te_fl_tensor out = *wide.c();
  out.dl.ndim = 1;
  out.dl.shape = shape;
  out.dl.strides = strides;
  FiveArgs args;
  args.a = args.b = args.c = args.d = in.c();
  args.out = &out;
  EXPECT_FAILS(call(args), kUnsupported, "separate pieces of memory");
  EXPECT_EQ(host.runs.load(), 0);
  shape[0] = 100;
  const Tensor few = in.slice(0, 0, 100).value();
  args.a = args.b = args.c = args.d = few.c();
  host.run_body = nullptr;
  far.forget();
  ASSERT_OK(call(args));
  EXPECT_EQ(far.writes().size(), 100u);
}

TEST_F(Staging, TensorsWithoutElementsMoveNothing) {
  add(host);
  const FiveArgs args = five(0);
  far.forget();
  ASSERT_OK(call(args));
  EXPECT_EQ(far.reads().size() + far.writes().size(), 0u);
  EXPECT_EQ(find_usage("default.host").staged_calls, 1u);
}

// ---- errors

TEST_F(Staging, AFailedRunLeavesTheDeviceAlone) {
  add(host);
  add(reference);
  const FiveArgs args = five();
  host.run_body = [](const te_fl_context&, const void* raw) -> te_fl_status {
    static_cast<float*>(static_cast<const FiveArgs*>(raw)->out->dl.data)[0] = 5;
    return TE_FL_INTERNAL;
  };
  EXPECT_FAILS(call(args), kInternal, "failed in 'default.host'");
  EXPECT_EQ(at(kept[4], 0), -1);
  EXPECT_EQ(reference.runs.load(), 0);
  host.run_body = [](const te_fl_context&, const void*) -> te_fl_status {
    return TE_FL_UNSUPPORTED;
  };
  ASSERT_OK(call(args));
  EXPECT_EQ(reference.runs.load(), 1);
  EXPECT_EQ(at(kept[4], 0), 1110);
}

TEST_F(Staging, FailedCopiesAreReported) {
  add(host);
  add(reference);
  const FiveArgs args = five();
  far.next_copy = TE_FL_INTERNAL;
  EXPECT_FAILS(call(args), kInternal, "the call's tensors could not be copied to the host");
  EXPECT_FAILS(call(args), kInternal, "the bus is down");
  EXPECT_EQ(host.runs.load() + reference.runs.load(), 0);
  far.next_copy = TE_FL_OK;
  // If the copy of a result back to the device fails, no other implementation may run, whatever the
  // status.
  host.run_body = [&](const te_fl_context&, const void*) -> te_fl_status {
    far.next_copy = TE_FL_UNSUPPORTED;
    return TE_FL_OK;
  };
  EXPECT_FAILS(call(args), kInternal, "the results could not be copied from the host");
  EXPECT_EQ(reference.runs.load(), 0);
  far.next_copy = TE_FL_DEVICE_LOST;
  EXPECT_EQ(call(args).code(), StatusCode::kDeviceLost);
  far.next_copy = TE_FL_OK;
  EXPECT_FAILS(call(args), kDeviceLost, "is lost since");
  core::g_device_hooks.on_added.load()(device);
  host.run_body = sum;
  ASSERT_OK(call(args));
}

TEST_F(Staging, WithoutPinnedMemoryPlainMemoryDoes) {
  add(host);
  const FiveArgs args = five();
  far.next_pinned = TE_FL_OUT_OF_MEMORY;
  ASSERT_OK(call(args));
  EXPECT_EQ(at(kept[4], 1), 1114);
  EXPECT_EQ(far.pinned.load(), 0);
  far.next_pinned = TE_FL_OK;
}

// ---- saved records

TEST_F(Staging, AnOpaqueRecordsStorageMovesAndItsBackwardGoesToItsProducer) {
  Fake forward("default.host", testing::save_schema(true)),
      backward("default.host", testing::save_schema(false)),
      stranger("vendor.native", testing::save_schema(false));
  stranger.desc.device_types = uint64_t{1} << TE_FL_DEVICE_EXT;
  stranger.desc.provider = "far";
  stranger.desc.vendor = "acme";
  forward.desc.saved_bytes = [](void*, const te_fl_context* ctx, const void* raw,
                                size_t* bytes) -> te_fl_status {
    EXPECT_EQ(ctx->device.type, TE_FL_DEVICE_CPU);
    EXPECT_EQ(static_cast<const SaveArgs*>(raw)->x->dl.device.type, TE_FL_DEVICE_CPU);
    *bytes = 4;
    return TE_FL_OK;
  };
  forward.run_body = [](const te_fl_context&, const void* raw) -> te_fl_status {
    te_fl_saved* saved = static_cast<const SaveArgs*>(raw)->saved;
    saved->opaque = 1;
    std::memcpy(saved->storage->dl.data, "kept", 4);
    return TE_FL_OK;
  };
  std::string found;
  backward.run_body = [&](const te_fl_context&, const void* raw) -> te_fl_status {
    found.assign(static_cast<char*>(static_cast<const SaveArgs*>(raw)->saved->storage->dl.data), 4);
    return TE_FL_OK;
  };
  add(forward);
  const OpId fwd = op;
  add(stranger);
  add(backward);
  const Tensor x = on_device(4, 0), y = on_device(4, 0);
  SaveArgs args;
  te_fl_saved record;
  args.x = x.c(), args.y = y.c(), args.saved = &record;
  ASSERT_EQ(manager.saved_bytes(fwd, &args).value(), 4u);
  const Tensor storage = Tensor::zeros({4}, DType::kU8, device).value();
  record.storage = storage.c();
  ASSERT_OK(manager.call(fwd, &args));
  EXPECT_EQ(record.opaque, 1u);
  EXPECT_STREQ(record.producer, "default.host");
  EXPECT_EQ(record.storage, storage.c());
  EXPECT_EQ(std::memcmp(far.real(storage.raw_data()), "kept", 4), 0);
  ASSERT_OK(manager.call(op, &args));
  EXPECT_EQ(found, "kept");
  EXPECT_EQ(stranger.runs.load(), 0);
}

TEST_F(Staging, ARecordThatIsFilledAgainBindsNoImplementation) {
  Fake forward("default.host", testing::save_schema(true));
  forward.run_body = [](const te_fl_context&, const void* raw) -> te_fl_status {
    const te_fl_saved* saved = static_cast<const SaveArgs*>(raw)->saved;
    return saved->opaque == 0 && saved->producer == nullptr ? TE_FL_OK : TE_FL_INTERNAL;
  };
  add(forward);
  const Tensor x = on_device(4, 0), y = on_device(4, 0);
  const Tensor storage = Tensor::zeros({4}, DType::kU8, device).value();
  te_fl_saved record;
  record.opaque = 1;  // a stale value from an earlier use of the record
  record.producer = "vendor.other";
  record.storage = storage.c();
  SaveArgs args;
  args.x = x.c(), args.y = y.c(), args.saved = &record;
  ASSERT_OK(manager.call(op, &args));
  EXPECT_EQ(record.opaque, 0u);
  EXPECT_STREQ(record.producer, "default.host");
}

// ---- catalogue ops that run in the built-in backends

class StagedCatalogue : public Staging {
 protected:
  static Status run(const char* name, const void* args, const CallOptions& options = {}) {
    return OpManager::instance().call(name, args, options);
  }
  Tensor quantised(bool compute_scale, bool columnwise) {
    QuantSpec spec;
    spec.columnwise = columnwise;
    spec.compute_scale = compute_scale;
    return Tensor::empty_quantized(Shape{4, 4}, spec, device).value();
  }
  bool wrote(const void* p) const {
    const auto address = reinterpret_cast<uintptr_t>(p);
    for (const auto& w : far.writes()) {
      if (address >= w.begin && address < w.begin + w.bytes) return true;
    }
    return false;
  }
};

TEST_F(StagedCatalogue, AQuantisedTensorMovesWithItsParts) {
  const Tensor x = on_device(16, -8).view({4, 4}).value();
  const Tensor q = quantised(false, true);
  // The initial values must arrive before the test writes its own.
  ASSERT_OK(devices::synchronize(device));
  const float amax = 50, scale = 2;
  std::memcpy(far.real(q.amax().raw_data()), &amax, 4);
  std::memcpy(far.real(q.scale().raw_data()), &scale, 4);
  far.forget();
  te_fl_quantize_args args;
  args.input = x.c(), args.output = q.c();
  ASSERT_OK(run("quantize", &args));
  EXPECT_EQ(at(q.amax(), 0), 50);  // the running maximum includes the device's old value
  EXPECT_EQ(at(q.scale_inv(), 0), 0.5f);
  EXPECT_FALSE(wrote(q.scale().raw_data()));  // a scale that the caller gives is only read
  EXPECT_TRUE(wrote(q.raw_data()));
  EXPECT_TRUE(wrote(q.columnwise_codes().raw_data()));
  te_fl_dequantize_args back;
  const Tensor y = Tensor::zeros({4, 4}, DType::kF32, device).value();
  back.input = q.c(), back.output = y.c();
  ASSERT_OK(run("dequantize", &back));
  for (int64_t i = 0; i < 16; ++i) EXPECT_EQ(at(y, i), static_cast<float>(i) - 8);
}

TEST_F(StagedCatalogue, ADerivedScaleComesBack) {
  const Tensor x = on_device(16, -8).view({4, 4}).value();
  const Tensor q = quantised(true, false);
  far.forget();
  te_fl_quantize_args args;
  args.input = x.c(), args.output = q.c();
  ASSERT_OK(run("quantize", &args));
  EXPECT_EQ(at(q.amax(), 0), 8);
  EXPECT_EQ(at(q.scale(), 0), 56);  // 448 / 8
  EXPECT_TRUE(wrote(q.scale().raw_data()));
}

TEST_F(StagedCatalogue, ANoOpFlagKeepsWhatTheDeviceHas) {
  const Tensor x = on_device(16, -8).view({4, 4}).value();
  const Tensor q = quantised(false, true);
  std::memset(far.real(q.raw_data()), 0x33, 16);
  std::memset(far.real(q.columnwise_codes().raw_data()), 0x44, 16);
  const Tensor flag = on_device(1, 1);
  te_fl_quantize_args args;
  args.input = x.c(), args.output = q.c(), args.noop_flag = flag.c();
  ASSERT_OK(run("quantize", &args));
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(far.real(q.raw_data())[i], 0x33);
    EXPECT_EQ(far.real(q.columnwise_codes().raw_data())[i], 0x44);
  }
}

TEST_F(StagedCatalogue, ListsMoveElementByElement) {
  std::vector<Tensor> in, out;
  std::vector<const te_fl_tensor*> ins, outs;
  for (int i = 0; i < 5; ++i) {
    in.push_back(on_device(3 + i, static_cast<float>(i)));
    out.push_back(on_device(3 + i, -1));
  }
  for (int i = 0; i < 5; ++i) {
    ins.push_back(in[static_cast<size_t>(i)].c());
    outs.push_back(out[static_cast<size_t>(i)].c());
  }
  const Tensor flag = Tensor::zeros({1}, DType::kI32, device).value();
  te_fl_multi_tensor_scale_args args;
  args.inputs = ins.data(), args.inputs_count = 5;
  args.outputs = outs.data(), args.outputs_count = 5;
  args.noop_flag = flag.c();
  args.scale = 2;
  ASSERT_OK(run("multi_tensor_scale", &args));
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(at(out[static_cast<size_t>(i)], 2 + i), 2.f * static_cast<float>(2 * i + 2));
  }
}

TEST_F(StagedCatalogue, RandomStateIsReadFromTheDevice) {
  const Tensor x = on_device(64, 1), y = on_device(64, 0), z = on_device(64, 0);
  const Tensor mask = Tensor::zeros({8}, DType::kU8, device).value();
  const Tensor state = Tensor::zeros({3}, DType::kU64, device).value();
  ASSERT_OK(devices::synchronize(device));  // zeros() may still be pending
  const uint64_t words[] = {1234, 99, 56};  // the words of the RNG state at separate addresses
  std::memcpy(far.real(state.raw_data()), words, sizeof words);
  te_fl_dropout_fwd_args args;
  args.input = x.c(), args.output = y.c(), args.mask = mask.c(), args.p = 0.5f;
  CallOptions by_pointer;
  by_pointer.rng = {.seed = 1,
                    .offset = 2,
                    .seed_address = state.data<uint64_t>(),
                    .offset_address = state.data<uint64_t>() + 2};
  ASSERT_OK(run("dropout_fwd", &args, by_pointer));
  args.output = z.c();
  CallOptions by_value;
  by_value.rng = {.seed = 1234, .offset = 58};  // the call's RNG offset is added to the state's: 56
                                                // + 2
  ASSERT_OK(run("dropout_fwd", &args, by_value));
  EXPECT_EQ(std::memcmp(far.real(y.raw_data()), far.real(z.raw_data()), 256), 0);
}

TEST_F(StagedCatalogue, HostArgumentsAndEnquiriesMoveNothing) {
  const Tensor x = Tensor::zeros({2, 8, 4, 64}, DType::kBF16, device).value();
  const Tensor answer = Tensor::zeros({1}, DType::kI32).value();
  te_fl_get_fused_attn_backend_args args;
  args.q = x.c(), args.k = x.c(), args.v = x.c(), args.backend = answer.c();
  args.layout = TE_FL_LAYOUT_BSHD;
  far.forget();
  ASSERT_OK(run("get_fused_attn_backend", &args));
  EXPECT_EQ(far.reads().size() + far.writes().size(), 0u);
}

}  // namespace
}  // namespace te_fl
