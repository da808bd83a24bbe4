#include "peer.hpp"

#ifdef TE_FL_BENCH_NCCL
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "backends/cuda/plugin/nccl.hpp"

namespace te_fl::bench_collectives {
namespace {

class NcclPeer : public Peer {
 public:
  NcclPeer(const cuda::Nccl& nccl, const std::shared_ptr<Store>& store, int rank, int size,
           int device)
      : nccl_(nccl), size_(size) {
    if (const cudaError_t error = cudaSetDevice(device); error != cudaSuccess)
      end("cudaSetDevice", cudaGetErrorString(error));
    cuda::NcclUniqueId id;
    if (rank == 0) {
      check(nccl_.unique_id(&id), "ncclGetUniqueId");
      const Status set =
          store->set("bench/nccl", std::string_view(id.internal, sizeof id.internal));
      if (!set.ok()) end("the store", set.to_string());
    } else {
      const auto got = store->get("bench/nccl", std::chrono::seconds(60));
      if (!got.ok()) end("the store", got.status().to_string());
      std::memcpy(id.internal, got->data(), sizeof id.internal);
    }
    check(nccl_.create(&communicator_, size, id, rank), "ncclCommInitRank");
  }
  ~NcclPeer() override { (void)nccl_.destroy(communicator_); }
  std::string name() const override { return "NCCL " + nccl_.version_text; }
  bool has(Op) const override { return true; }
  void call(Op op, float* input, float* output, size_t elements, void* stream) override {
    auto* const s = static_cast<cudaStream_t>(stream);
    const size_t part = elements / static_cast<size_t>(size_);
    int status = 0;
    if (op == Op::kAllReduce) {
      status = nccl_.all_reduce(input, output, elements, cuda::kNcclF32, cuda::kNcclSum,
                                communicator_, s);
    } else if (op == Op::kAllGather) {
      status = nccl_.all_gather(input, output, part, cuda::kNcclF32, communicator_, s);
    } else if (op == Op::kReduceScatter) {
      status = nccl_.reduce_scatter(input, output, part, cuda::kNcclF32, cuda::kNcclSum,
                                    communicator_, s);
    } else if (op == Op::kAllToAll) {
      // Builds all_to_all from sends and receives; only the newest versions of NCCL have an
      // all_to_all of their own.
      check(nccl_.group_start(), "ncclGroupStart");
      for (int r = 0; r < size_ && status == cuda::kNcclSuccess; ++r) {
        const size_t at = static_cast<size_t>(r) * part;
        status = nccl_.send(input + at, part, cuda::kNcclF32, r, communicator_, s);
        if (status != cuda::kNcclSuccess) break;
        status = nccl_.recv(output + at, part, cuda::kNcclF32, r, communicator_, s);
      }
      check(nccl_.group_end(), "ncclGroupEnd");
    } else {
      status = nccl_.broadcast(output, output, elements, cuda::kNcclF32, 0, communicator_, s);
    }
    check(status, "a collective");
  }

 private:
  [[noreturn]] static void end(const char* what, const std::string& why) {
    std::fprintf(stderr, "NCCL called directly: %s: %s\n", what, why.c_str());
    std::exit(1);
  }
  void check(int status, const char* what) const {
    if (status != cuda::kNcclSuccess) end(what, nccl_.error_text(status));
  }
  const cuda::Nccl& nccl_;
  int size_;
  void* communicator_ = nullptr;
};

}  // namespace

std::unique_ptr<Peer> make_nccl(const std::shared_ptr<Store>& store, int rank, int size, int device,
                                std::string& why) {
  const cuda::Nccl* nccl = cuda::nccl();
  if (nccl != nullptr) return std::make_unique<NcclPeer>(*nccl, store, rank, size, device);
  why = cuda::nccl_missing();
  return nullptr;
}

}  // namespace te_fl::bench_collectives
#else
namespace te_fl::bench_collectives {
std::unique_ptr<Peer> make_nccl(const std::shared_ptr<Store>&, int, int, int, std::string& why) {
  why = "this program was built without the CUDA plugin; configure with it";
  return nullptr;
}
}  // namespace te_fl::bench_collectives
#endif
