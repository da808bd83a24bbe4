// Tensors with metadata but without memory, because the choice of a kernel never reads elements.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "te_fl/dtype.hpp"
#include "te_fl/plugin.h"

namespace te_fl::cuda {

// A compact tensor whose address is `offset` bytes past a multiple of 256.
struct MetadataTensor {
  alignas(256) static inline char memory[256];
  std::vector<int64_t> shape;
  te_fl_quant quant{};
  te_fl_tensor t{};

  MetadataTensor(int dtype, std::vector<int64_t> extents, uint64_t offset = 0)
      : shape(std::move(extents)) {
    t.struct_size = sizeof t;
    t.dl.data = memory;
    t.dl.byte_offset = offset;
    t.dl.ndim = static_cast<int32_t>(shape.size());
    t.dl.dtype = to_c(static_cast<DType>(dtype));
    t.dl.shape = shape.data();
  }
  MetadataTensor(const MetadataTensor&) = delete;
  MetadataTensor& operator=(const MetadataTensor&) = delete;

  // Makes the tensor quantised; `both` adds column-wise data.
  void quantise(uint32_t scaling, bool both, bool compute_scale = false) {
    quant.scaling = scaling;
    quant.scale_inv = quant.columnwise_scale_inv = memory;
    quant.columnwise_data = both ? memory : nullptr;
    quant.flags = compute_scale ? TE_FL_QUANT_COMPUTE_SCALE : 0;
    t.quant = &quant;
  }
};

}  // namespace te_fl::cuda
