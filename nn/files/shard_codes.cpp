#include "nn/files/shard_codes.hpp"

#include <algorithm>
#include <cstring>

#include "nn/files/shard_places.hpp"
#include "nn/fp8/fp8_values.hpp"

namespace te_fl::nn::detail {
namespace {

bool one_scale(const std::vector<const CodesPart*>& parts) {
  return std::ranges::all_of(parts, [&](const CodesPart* p) {
    return std::memcmp(p->scale_inv.raw_data(), parts[0]->scale_inv.raw_data(), 4) == 0;
  });
}

// Returns the largest amax of the parts, if the parts cover all elements of the shard; otherwise
// undefined.
Result<Tensor> join_amax(const std::vector<const CodesPart*>& parts, int64_t elements) {
  float largest = 0;
  for (const CodesPart* p : parts) {
    if (!p->amax.defined()) return Tensor();
    largest = std::max(largest, *p->amax.data<float>());
    elements -= p->codes.numel();
  }
  if (elements != 0) return Tensor();
  return Tensor::from_values({1}, std::span(&largest, 1));
}

Result<Tensor> dequantize_part(const CodesPart& part) {
  QuantSpec spec;
  spec.dtype = part.codes.dtype();
  TE_FL_ASSIGN_OR_RETURN(const Tensor quantised,
                         Tensor::empty_quantized(part.codes.shape(), spec, Device()));
  const Tensor& any_amax = part.scale_inv;  // the values do not depend on it
  TE_FL_RETURN_IF_ERROR(load_codes(part.codes, part.scale_inv, any_amax, quantised));
  TE_FL_ASSIGN_OR_RETURN(Tensor values, Tensor::empty(part.codes.shape(), DType::kF32));
  TE_FL_RETURN_IF_ERROR(copy_values(quantised, values));
  return values;
}

}  // namespace

Result<std::vector<NamedTensor>> codes_of_part(const std::string& name,
                                               const std::vector<CodesPart>& files,
                                               std::span<const int64_t> shape, const Shard& place) {
  std::vector<const CodesPart*> met;
  for (const CodesPart& file : files) {
    if (file.place.whole == place.whole && overlap(file.codes.shape(), file.place, shape, place)) {
      met.push_back(&file);
    }
  }
  const bool codes = !met.empty() && one_scale(met);
  const DType dtype = codes ? files[0].codes.dtype() : DType::kF32;
  TE_FL_ASSIGN_OR_RETURN(const Tensor whole, Tensor::empty(place.whole, dtype));
  TE_FL_ASSIGN_OR_RETURN(Tensor part, Tensor::empty(shape, dtype));
  bool fits = !met.empty();
  for (const CodesPart* p : met) {
    Tensor values = p->codes;
    if (!codes) {
      TE_FL_ASSIGN_OR_RETURN(values, dequantize_part(*p));
    }
    fits = fits && copy_part(whole, values, p->place, true);
  }
  if (!fits || !copy_part(whole, part, place, false)) {
    return invalid_argument("tensor " + name + " is of the whole " + whole.describe() +
                            ", of which this rank has no part of " + part.describe() +
                            "; the sizes of the module are others");
  }
  std::vector<NamedTensor> result{{name, part}};
  if (!codes) return result;
  result.push_back({name + ".scale_inv", met[0]->scale_inv});
  TE_FL_ASSIGN_OR_RETURN(Tensor amax, join_amax(met, part.numel()));
  if (amax.defined()) result.push_back({name + ".amax", std::move(amax)});
  return result;
}

}  // namespace te_fl::nn::detail
