// Lists of tensors for ops with list arguments: their shapes, names and memory.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "conformance/drawn.hpp"

namespace te_fl::conformance {

using Shapes = std::vector<Dims>;
inline const Shapes kFew = {{7, 33}, {1}, {0, 4}, {5, 3, 2}};

inline Shapes many() {
  Shapes all;
  for (int64_t i = 0; i < 300; ++i) all.push_back({i % 7, i % 5 + 1});
  return all;
}

inline std::string shapes_name(const Shapes& s) {
  return s.empty()       ? "none"
         : s.size() == 1 ? dims_name(s[0])
                         : std::to_string(s.size()) + "_tensors";
}

inline std::string shift_name(int64_t shift) {
  return shift == 0 ? "" : "/shift=" + std::to_string(shift);
}

using Maker = std::function<Tensor*(const std::string&, const Dims&, size_t)>;
inline std::vector<Tensor*> make_list(Problem& p, const std::string& name, const Shapes& shapes,
                                      const Maker& make) {
  std::vector<Tensor*> list;
  for (size_t i = 0; i < shapes.size(); ++i)
    list.push_back(p.unnamed(make(name + "[" + std::to_string(i) + "]", shapes[i], i)));
  p.list(name, list);
  return list;
}
// `shift`: each tensor begins that many elements after the start of its memory, plus one more for
// each further tensor, so that all alignments that the dtype allows occur.
inline std::vector<Tensor*> make_list(Problem& p, const std::string& name, Role role, int dtype,
                                      const Shapes& shapes, int64_t shift, const Fill& fill) {
  return make_list(p, name, shapes, [&](const std::string& n, const Dims& d, size_t i) {
    if (shift == 0) return p.strided(n, role, dtype, d, {}, fill);
    const int64_t offset = (shift + static_cast<int64_t>(i)) % 16;
    int64_t elements = offset;
    for (int64_t rest = 1; const int64_t e : d) elements = offset + (rest *= e);
    return p.strided(n, role, dtype, d, {}, fill, nullptr, offset, elements);
  });
}
inline std::vector<Tensor*> list_in(Problem& p, const std::string& name, int dtype,
                                    const Shapes& shapes, const Fill& fill = gaussian(),
                                    int64_t shift = 0) {
  return make_list(p, name, Role::kIn, dtype, shapes, shift, fill);
}
inline std::vector<Tensor*> list_inout(Problem& p, const std::string& name, int dtype,
                                       const Shapes& shapes, const Fill& fill = gaussian(),
                                       int64_t shift = 0) {
  return make_list(p, name, Role::kInOut, dtype, shapes, shift, fill);
}
inline std::vector<Tensor*> list_out(Problem& p, const std::string& name, int dtype,
                                     const Shapes& shapes, int64_t shift = 0) {
  return make_list(p, name, Role::kOut, dtype, shapes, shift, constant(0));
}

// Random lists of any length; many tensors are empty or have one element.
inline Shapes draw_shapes(Draw& r) {
  if (r.swept != nullptr) return {{r.swept->columns}, {r.swept->rows, r.swept->columns}};
  Shapes shapes(static_cast<size_t>(Drawn::chance(r, 6) ? 100 + r.below(100) : r.below(24)));
  int64_t left = 40000;
  for (Dims& dims : shapes) {
    dims = Drawn::chance(r, 5)   ? Dims{0}
           : Drawn::chance(r, 5) ? Dims{1}
           : Drawn::chance(r, 3)
               ? Dims{1 + r.below(5), Drawn::extent(r, std::min<int64_t>(left, 1025))}
               : Dims{Drawn::extent(r, std::min<int64_t>(left, 4097))};
    left = std::max<int64_t>(1, left - dims[0] * dims.back());
  }
  return shapes;
}

inline int64_t draw_shift(Draw& r) { return Drawn::chance(r, 3) ? 0 : 1 + r.below(15); }

}  // namespace te_fl::conformance
