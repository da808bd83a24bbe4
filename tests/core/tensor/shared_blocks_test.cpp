// The memory of quantised tensors that are created together: cut from shared blocks.
#include "core/tensor/shared_blocks.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <thread>
#include <vector>

#include "support/expect.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl {
namespace {

constexpr QuantSpec kBoth{.dtype = DType::kF8E4M3,
                          .scaling = Scaling::kBlock1x128,
                          .rowwise = true,
                          .columnwise = true,
                          .clear_scales = false};

Tensor make(int64_t rows) {
  return Tensor::empty_quantized(std::array<int64_t, 2>{rows, 128}, kBoth).value();
}
int64_t distance(const void* from, const void* to) {
  return static_cast<const char*>(to) - static_cast<const char*>(from);
}

TEST(SharedBlocks, TensorsFollowOneAnotherInABlock) {
  const core::SharedBlocks blocks(Device{}, 4096, 16384);
  const Tensor a = make(3), b = make(0), c = make(5);
  EXPECT_EQ(distance(a.raw_data(), b.raw_data()), 512);  // 384 bytes, rounded up to 256
  EXPECT_EQ(distance(b.raw_data(), c.raw_data()), 256);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(c.columnwise_codes().raw_data()) % 128, 0u);
}

TEST(SharedBlocks, LaterTensorsTakeAnotherBlock) {
  const core::SharedBlocks blocks(Device{}, 512, 512);
  std::vector<Tensor> all;
  for (int64_t rows : {4, 64, 1, 2, 300}) all.push_back(make(rows));
  for (size_t i = 0; i < all.size(); ++i) {
    std::memset(all[i].raw_data(), static_cast<int>(i), static_cast<size_t>(all[i].numel()));
  }
  for (size_t i = 0; i < all.size(); ++i) {
    const auto* bytes = all[i].data<uint8_t>();
    for (int64_t j = 0; j < all[i].numel(); ++j) ASSERT_EQ(bytes[j], i) << j;
  }
}

// The address sanitizer reports a use of memory that was freed too early.
TEST(SharedBlocks, ATensorKeepsItsBlock) {
  std::optional<Tensor> left;
  {
    const core::SharedBlocks blocks(Device{}, 4096, 4096);
    const Tensor first = make(3);
    left = make(3);
  }
  std::memset(left->raw_data(), 7, static_cast<size_t>(left->numel()));
  std::memset(left->columnwise_codes().raw_data(), 7, static_cast<size_t>(left->numel()));
  EXPECT_EQ(left->data<uint8_t>()[383], 7);
}

TEST(SharedBlocks, OtherThreadsAndLaterTensorsHaveTheirOwn) {
  constexpr int64_t kBytes = 4096;
  Tensor inside, beside;
  {
    const core::SharedBlocks blocks(Device{}, kBytes, kBytes);
    inside = make(1);
    std::thread([&] { beside = make(1); }).join();
  }
  const Tensor later = make(1);
  for (const Tensor* other : std::initializer_list<const Tensor*>{&beside, &later}) {
    const int64_t from = distance(inside.raw_data(), other->raw_data());
    EXPECT_TRUE(from < 0 || from >= kBytes) << from;  // the block holds no other allocation
  }
}

}  // namespace
}  // namespace te_fl
