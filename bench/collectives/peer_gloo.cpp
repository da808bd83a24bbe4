#include "peer.hpp"

#ifdef TE_FL_BENCH_GLOO
#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/alltoall.h>
#include <gloo/broadcast.h>
#include <gloo/config.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>

#include <cstdlib>
#include <stdexcept>

namespace te_fl::bench_collectives {
namespace {

constexpr std::chrono::milliseconds kTimeout(60000);

template <class T>
T value_or_exit(Result<T> result) {
  if (result.ok()) return std::move(result).value();
  throw std::runtime_error(result.status().to_string());
}

// Adapts the job's store to Gloo's store interface.
class Rendezvous : public ::gloo::rendezvous::Store {
 public:
  explicit Rendezvous(std::shared_ptr<te_fl::Store> store) : store_(std::move(store)) {}
  void set(const std::string& key, const std::vector<char>& data) override {
    const Status set = store_->set("bench/" + key, std::string_view(data.data(), data.size()));
    if (!set.ok()) throw std::runtime_error(set.to_string());
  }
  std::vector<char> get(const std::string& key) override {
    const std::string value = value_or_exit(store_->get("bench/" + key, kTimeout));
    return {value.begin(), value.end()};
  }
  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) (void)get(key);
  }

 private:
  std::shared_ptr<te_fl::Store> store_;
};

class Gloo : public Peer {
 public:
  Gloo(const std::shared_ptr<te_fl::Store>& store, int rank, int size)
      : context_(std::make_shared<::gloo::rendezvous::Context>(rank, size)) {
    // Uses the same network interface as te-fl's plugin.
    ::gloo::transport::tcp::attr attr;
    const char* interface = std::getenv("TE_FL_GLOO_INTERFACE");
    attr.iface = interface == nullptr ? "" : interface;
    char host[256] = "localhost";
    if (interface == nullptr && ::gethostname(host, sizeof host - 1) == 0) attr.hostname = host;
    std::shared_ptr<::gloo::transport::Device> device = ::gloo::transport::tcp::CreateDevice(attr);
    Rendezvous rendezvous(store);
    context_->connectFullMesh(rendezvous, device);
  }
  std::string name() const override {
    return "Gloo " + std::to_string(GLOO_VERSION_MAJOR) + "." + std::to_string(GLOO_VERSION_MINOR) +
           "." + std::to_string(GLOO_VERSION_PATCH);
  }
  // Gloo has no reduce_scatter here: this version lacks one that takes a context and a tag.
  bool has(Op op) const override { return op != Op::kReduceScatter; }
  void call(Op op, float* input, float* output, size_t elements, void*) override {
    const auto size = static_cast<size_t>(context_->size);
    const uint32_t tag = ++calls_;
    if (op == Op::kAllReduce) {
      ::gloo::AllreduceOptions options(context_);
      options.setInput(input, elements);
      options.setOutput(output, elements);
      void (*const sum)(void*, const void*, const void*, size_t) = &::gloo::sum<float>;
      options.setReduceFunction(sum);
      options.setTag(tag);
      ::gloo::allreduce(options);
    } else if (op == Op::kAllGather) {
      ::gloo::AllgatherOptions options(context_);
      options.setInput(input, elements / size);
      options.setOutput(output, elements);
      options.setTag(tag);
      ::gloo::allgather(options);
    } else if (op == Op::kAllToAll) {
      ::gloo::AlltoallOptions options(context_);
      options.setInput(input, elements);
      options.setOutput(output, elements);
      options.setTag(tag);
      ::gloo::alltoall(options);
    } else {
      ::gloo::BroadcastOptions options(context_);
      options.setOutput(output, elements);
      options.setRoot(0);
      options.setTag(tag);
      ::gloo::broadcast(options);
    }
  }

 private:
  std::shared_ptr<::gloo::rendezvous::Context> context_;
  uint32_t calls_ = 0;
};

}  // namespace

std::unique_ptr<Peer> make_gloo(const std::shared_ptr<te_fl::Store>& store, int rank, int size,
                                std::string&) {
  return std::make_unique<Gloo>(store, rank, size);
}

}  // namespace te_fl::bench_collectives
#else
namespace te_fl::bench_collectives {
std::unique_ptr<Peer> make_gloo(const std::shared_ptr<Store>&, int, int, std::string& why) {
  why = "this program was built without Gloo: install libgloo-dev and configure again";
  return nullptr;
}
}  // namespace te_fl::bench_collectives
#endif
