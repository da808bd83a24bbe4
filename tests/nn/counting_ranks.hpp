#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "nn_test_util.hpp"
#include "registry/comm_providers.hpp"

namespace te_fl::nn::testing {

// A collectives provider, "counted", whose ranks are threads. Counts the collectives called and the
// bytes passed to them. Only one instance may exist at a time.
class CountingRanks {
 public:
  struct Count {
    int64_t calls = 0;
    int64_t bytes = 0;  // bytes of the first tensor, summed over all ranks
  };

  CountingRanks() {
    (void)OpManager::instance();  // registers the built-in providers
    const auto providers = registry::comm_providers();
    const auto threads = std::ranges::find(providers, "threads", &registry::CommProvider::name);
    if (threads == providers.end()) throw std::runtime_error("there is no provider 'threads'");
    provider_ = (*threads)->desc;
    provider_.name = "counted";
    const te_fl_comm_desc* const list[] = {&provider_};
    check(registry::add_comm_providers(list, kOwner, "test", "1", nullptr));
    std::vector<const te_fl_op_desc*> ops;
    for (const OpImplInfo& info : OpRegistry::instance().snapshot()) {
      if (info.impl_id != "reference.host") continue;
      if (info.op == "all_reduce") ops.push_back(counted<te_fl_all_reduce_args>(info));
      if (info.op == "all_gather") ops.push_back(counted<te_fl_all_gather_args>(info));
      if (info.op == "reduce_scatter") ops.push_back(counted<te_fl_reduce_scatter_args>(info));
    }
    check(OpRegistry::instance().register_ops(ops, kOwner, "test"));
  }
  ~CountingRanks() {
    EXPECT_TRUE(registry::remove_comm_providers(kOwner).ok());
    EXPECT_TRUE(OpRegistry::instance().unregister_owner(kOwner).ok());
  }
  CountingRanks(const CountingRanks&) = delete;
  CountingRanks& operator=(const CountingRanks&) = delete;

  // Returns the counts by op since the last call of take_counts(). No rank may be running.
  std::map<std::string, Count> take_counts() {
    const std::lock_guard lock(mutex_);
    return std::exchange(counts_, {});
  }

 private:
  static constexpr char kOwner[] = "counted";
  struct Op {
    CountingRanks* ranks;
    std::string name;
    te_fl_op_desc inner, desc;
  };

  template <class Args>
  const te_fl_op_desc* counted(const OpImplInfo& info) {
    Op& op = *ops_.emplace_back(std::make_unique<Op>(Op{this, info.op, info.desc, info.desc}));
    op.desc.op_name = op.name.c_str();
    op.desc.impl_id = "default.counted";
    op.desc.kind = TE_FL_KIND_DEFAULT;
    op.desc.self = &op;
    op.desc.supports = nullptr;
    op.desc.run = [](void* self, const te_fl_context* context, const void* raw) {
      const Op& which = *static_cast<const Op*>(self);
      const te_fl_tensor& brought = *static_cast<const Args*>(raw)->input;
      int64_t bytes = brought.dl.dtype.bits / 8;
      for (int32_t i = 0; i < brought.dl.ndim; ++i) bytes *= brought.dl.shape[i];
      {
        const std::lock_guard lock(which.ranks->mutex_);
        Count& count = which.ranks->counts_[which.name];
        ++count.calls;
        count.bytes += bytes;
      }
      return which.inner.run(which.inner.self, context, raw);
    };
    return &op.desc;
  }

  te_fl_comm_desc provider_{};
  std::vector<std::unique_ptr<Op>> ops_;
  std::mutex mutex_;
  std::map<std::string, Count> counts_;
};

}  // namespace te_fl::nn::testing
