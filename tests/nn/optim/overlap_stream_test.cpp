// Collectives that start during a backward, on a device with streams. They run on a stream of their
// own, after the writes of their inputs and before the reads of their results, eagerly and in a
// graph.
#include "parallel_fixture.hpp"
#include "registry/comm_providers.hpp"
#include "support/expect.hpp"
#include "support/recording_device.hpp"

namespace te_fl::nn::testing::overlap_stream_test {
namespace {

using te_fl::testing::RecordingDevice;

// A fake collectives provider that simulates two ranks: the other rank's tensors are all zeros, so
// an average over the ranks halves this rank's values.
class HalvingRanks : public ::testing::Test {
 protected:
  HalvingRanks() {
    api_.create = [](void* self, const te_fl_comm_config*, void** out, const te_fl_error_sink*) {
      *out = self;
      return te_fl_status{TE_FL_OK};
    };
    api_.destroy = [](void*) {};
    api_.abort = [](void*) {};
    provider_.name = "halves";
    provider_.kind = TE_FL_KIND_DEFAULT;
    provider_.flags = TE_FL_COMM_CAPTURABLE;
    provider_.device_types = uint64_t{1} << TE_FL_DEVICE_EXT;
    provider_.self = this;
    provider_.api = &api_;
    const te_fl_comm_desc* const providers[] = {&provider_};
    check(registry::add_comm_providers(providers, "halver", "halver", "1", nullptr));
    op_.op_name = "all_reduce";
    op_.impl_id = "default.halver";
    op_.kind = TE_FL_KIND_DEFAULT;
    op_.device_types = uint64_t{1} << TE_FL_DEVICE_EXT;
    op_.provider = "recorder";
    op_.self = this;
    op_.flags = TE_FL_OP_GRAPH_SAFE | TE_FL_OP_IN_PLACE_OK;
    op_.run = [](void* self, const te_fl_context* ctx, const void* args) {
      return static_cast<HalvingRanks*>(self)->halve(
          ctx, *static_cast<const te_fl_all_reduce_args*>(args));
    };
    const te_fl_op_desc* const ops[] = {&op_};
    check(OpRegistry::instance().register_ops(ops, "halver", "halver"));
  }
  void TearDown() override {
    comm_.reset();
    ASSERT_OK(registry::remove_comm_providers("halver"));
    ASSERT_OK(OpRegistry::instance().unregister_owner("halver"));
    ASSERT_OK(devices::remove(recorder_.device()));
    EXPECT_EQ(recorder_.blocks(), 0u) << "memory is left";
  }

  te_fl_status halve(const te_fl_context* ctx, const te_fl_all_reduce_args& args) {
    auto* const data = static_cast<float*>(args.output->dl.data);
    const int64_t count = args.output->dl.shape[0];
    streams_.push_back(ctx->stream);
    recorder_.queues.enqueue(ctx->stream, [data, count]() -> te_fl_status {
      for (int64_t i = 0; i < count; ++i) data[i] *= 0.5f;
      return TE_FL_OK;
    });
    // Simulates a fast stream: launches run immediately unless they must wait for an event.
    if (fast_ && (ctx->flags & TE_FL_CALL_CAPTURING) == 0) {
      recorder_.queues.run_some(ctx->stream, 100);
    }
    return TE_FL_OK;
  }

  // Returns the communicator of rank 0 of two; both ranks are created here.
  std::shared_ptr<const Comm> comm() {
    const std::shared_ptr<Store> store = Store::in_process();
    const auto make = [&](int rank) {
      CommOptions options;
      options.device = recorder_.device();
      options.rank = rank;
      options.size = 2;
      options.store = store;
      options.provider = "halves";
      return shared(Comm::create(options));
    };
    std::thread other([&] {
      try {
        (void)make(1);
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
    });
    comm_ = make(0);
    other.join();
    return comm_;
  }

  RecordingDevice recorder_;
  te_fl_comm_api api_;
  te_fl_comm_desc provider_;
  te_fl_op_desc op_{};
  std::shared_ptr<const Comm> comm_;
  std::vector<void*> streams_;  // streams on which collectives have run
  bool fast_ = false;
};

// Three Linear modules and their training step. Its gradients depend on an input tensor that the
// test writes.
struct Maps {
  explicit Maps(const Device& device) {
    for (uint64_t i = 0; i < 3; ++i) {
      maps.push_back(take(Linear::create({.in_features = 4,
                                          .out_features = 4,
                                          .bias = false,
                                          .device = device,
                                          .seed = i + 1,
                                          .init_std = 0.5f})));
      parameters.push_back(maps.back()->parameters()[0]);
    }
    x = take(Tensor::zeros({2, 4}, DType::kF32, device));
  }
  Status step(DataParallel& data) {
    for (const auto& map : maps) TE_FL_RETURN_IF_ERROR(map->zero_grad());
    std::vector<Ctx> kept(maps.size());
    Tensor y = x;
    for (size_t i = 0; i < maps.size(); ++i) {
      TE_FL_ASSIGN_OR_RETURN(y, maps[i]->forward(y, &kept[i]));
    }
    {
      const auto last = data.last_backward();
      for (size_t i = maps.size(); i-- > 0;) {
        TE_FL_ASSIGN_OR_RETURN(y, maps[i]->backward(y, kept[i]));
      }
    }
    return data.average_gradients();
  }
  std::vector<Values> gradients() const {
    std::vector<Values> values;
    for (const NamedParameter& p : parameters) {
      values.push_back(values_of(take(p.grad().to(Device()))));
    }
    return values;
  }

  std::vector<std::unique_ptr<Linear>> maps;
  std::vector<NamedParameter> parameters;
  Tensor x;
};

Tensor input(int64_t step) {
  return tensor({2, 4}, random_values(8, static_cast<uint64_t>(step) + 1));
}

std::vector<Values> halves_on_host(int64_t step) {
  Maps maps{Device()};
  maps.x = input(step);
  const auto alone = take(DataParallel::create(maps.parameters, nullptr));
  check(maps.step(*alone));
  std::vector<Values> values = maps.gradients();
  for (Values& gradient : values) {
    for (double& v : gradient) v /= 2;
  }
  return values;
}

// Compares with tolerance: the device runs the reference ops, and the host runs other kernels.
void expect_near(const std::vector<Values>& got, const std::vector<Values>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    for (size_t k = 0; k < got[i].size(); ++k) EXPECT_NEAR(got[i][k], expected[i][k], 1e-6);
  }
}

TEST_F(HalvingRanks, CollectivesRunBesideTheBackwardAndInItsOrder) {
  for (const bool fast : {false, true}) {
    fast_ = fast;
    streams_.clear();
    Maps maps(recorder_.device());
    const auto data = take(DataParallel::create(maps.parameters, comm(), {.bucket_bytes = 1}));
    for (int64_t step = 0; step < 3; ++step) {
      maps.x = take(input(step).to(recorder_.device()));
      check(maps.step(*data));
      expect_near(maps.gradients(), halves_on_host(step));
    }
    ASSERT_EQ(streams_.size(), 9u);
    EXPECT_EQ(std::vector(streams_.begin(), streams_.begin() + 3), std::vector<void*>(3));
    EXPECT_NE(streams_[3], nullptr) << "from the second step on a stream of their own";
    EXPECT_EQ(std::vector(streams_.begin() + 3, streams_.end()), std::vector(6, streams_[3]));
  }
}

TEST_F(HalvingRanks, GraphsHaveTheCollectivesOnTheirStream) {
  Maps maps(recorder_.device());
  const auto data = take(DataParallel::create(maps.parameters, comm(), {.bucket_bytes = 1}));
  const auto graphed = take(GraphedStep::create(recorder_.device(),
                                                [&]() -> Result<std::vector<Tensor>> {
                                                  TE_FL_RETURN_IF_ERROR(maps.step(*data));
                                                  return std::vector<Tensor>{};
                                                },
                                                {.inputs = {maps.x}}));
  for (int64_t step = 0; step < 6; ++step) {
    take(graphed->run(std::vector<Tensor>{input(step)}));
    expect_near(maps.gradients(), halves_on_host(step));
  }
  EXPECT_TRUE(graphed->captured());
  EXPECT_EQ(streams_.size(), 12u) << "three eager steps and the captured one";
  EXPECT_NE(streams_.back(), graphed->stream());
}

}  // namespace
}  // namespace te_fl::nn::testing::overlap_stream_test
