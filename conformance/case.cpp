#include "conformance/case.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <stdexcept>

#include "conformance/oracle_quantize.hpp"

namespace te_fl::conformance {
namespace {
constexpr uint8_t kGuardByte = 0xc5;
constexpr size_t kAlignment = 256;

// The value of memory that the op must write: NaN in all float formats that have one, otherwise an
// unlikely result. The NaNs of 16 bits and more have a payload of their own, since a result may be
// the NaN whose bits are all 1, or the one whose payload is 0.
uint64_t poison(int dtype) {
  switch (dtype) {
    case TE_FL_F64:
      return 0x7ffdc39a6b175e2du;
    case TE_FL_F32:
      return 0x7fd5b16bu;
    case TE_FL_F16:
      return 0x7ed5u;
    case TE_FL_BF16:
      return 0x7fd5u;
    default:
      return is_float(dtype) && dtype != TE_FL_F4E2M1 ? 0xffu : 0xababababababababu;
  }
}

// An amax larger than the data of all cases, except cases about large values.
constexpr float kLargeAmax = 1e30f;

}  // namespace

uint64_t hash_text(const std::string& s) {
  uint64_t h = 1469598103934665603u;
  for (char c : s) h = (h ^ static_cast<uint8_t>(c)) * 1099511628211u;
  return h;
}

Buffer::Buffer(size_t bytes, uint8_t fill) : raw_(bytes + 2 * kGuard + kAlignment), size_(bytes) {
  base_ = raw_.data() +
          (kAlignment - reinterpret_cast<uintptr_t>(raw_.data()) % kAlignment) % kAlignment;
  std::fill(base_, base_ + size_ + 2 * kGuard, kGuardByte);
  std::fill(data(), data() + size_, fill);
  freeze();
}
std::shared_ptr<Buffer> make_poisoned(int dtype, int64_t elements) {
  const size_t width = static_cast<size_t>(std::max(storage_bits(dtype) / 8, 1));
  const uint64_t value = poison(dtype);
  auto buffer = std::make_shared<Buffer>(bytes_for(dtype, elements), uint8_t{0});
  for (size_t i = 0; i < buffer->size(); i += width) std::memcpy(buffer->data() + i, &value, width);
  buffer->freeze();
  return buffer;
}
void Buffer::freeze() { initial_.assign(data(), data() + size_); }
void Buffer::restore() {
  std::fill(base_, base_ + size_ + 2 * kGuard, kGuardByte);
  std::copy(initial_.begin(), initial_.end(), data());
}
std::string Buffer::written_outside() const {
  const auto written = [](uint8_t b) { return b != kGuardByte; };
  const uint8_t *const end = base_ + kGuard + size_, *const last = end + kGuard;
  const auto of_bytes = " of its " + std::to_string(size_) + " bytes";
  if (const uint8_t* at = std::find_if(end, last, written); at != last)
    return "byte " + std::to_string(at - end) + " behind the end" + of_bytes;
  const std::reverse_iterator<const uint8_t*> from(data()), to(base_);
  if (const auto at = std::find_if(from, to, written); at != to)
    return "byte " + std::to_string(at - from + 1) + " before the start" + of_bytes;
  return {};
}
bool Buffer::unchanged() const { return std::equal(initial_.begin(), initial_.end(), data()); }
size_t Buffer::first_change() const {
  return static_cast<size_t>(std::mismatch(initial_.begin(), initial_.end(), data()).first -
                             initial_.begin());
}

std::string Spec::name() const {
  if (!quantised()) return name_of(dtype);
  static const char* const modes[] = {"none",         "tensor", "block1x128",
                                      "block128x128", "mxfp8",  "nvfp4"};
  std::string text = std::string(name_of(dtype)) + "." + modes[scaling];
  if (current()) text += ".current";
  if (pow2()) text += ".pow2";
  if (epsilon != 0) text += ".eps";
  if (!has_amax) text += ".noamax";
  if (amax_before == kLargeAmax) text += ".kept_amax";
  return text + (row && col ? ".row+col" : row ? ".row" : ".col");
}

int64_t Tensor::numel() const {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}
int64_t Tensor::cols() const { return shape.empty() ? 1 : shape.back(); }
int64_t Tensor::rows() const {
  int64_t n = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) n *= shape[i];
  return n;
}
int64_t Tensor::index(int64_t i) const {
  if (strides.empty()) return offset + i;
  int64_t at = offset;
  for (size_t d = shape.size(); d-- > 0; i /= shape[d]) at += i % shape[d] * strides[d];
  return at;
}
std::vector<double> Tensor::values() const {
  std::vector<double> v(static_cast<size_t>(numel()));
  for (int64_t i = 0; i < numel(); ++i) v[i] = get(i);
  return v;
}
std::vector<Buffer*> Tensor::buffers() const {
  std::vector<Buffer*> all;
  for (const auto& b : {data, col_data, scale_inv, col_scale_inv, amax, scale})
    if (b != nullptr) all.push_back(b.get());
  return all;
}

void Tensor::bind() {
  auto pointer = [](const std::shared_ptr<Buffer>& b) {
    return b == nullptr ? nullptr : b->data();
  };
  c.struct_size = sizeof c;
  c.dl.data = pointer(data);
  c.dl.device = {TE_FL_DEVICE_CPU, 0};
  c.dl.ndim = static_cast<int32_t>(shape.size());
  c.dl.dtype = c_dtype(spec.dtype);
  c.dl.shape = shape.data();
  c.dl.strides = strides.empty() ? nullptr : strides.data();
  c.dl.byte_offset = static_cast<uint64_t>(offset * storage_bits(spec.dtype) / 8);
  if (!spec.quantised()) return;
  quant.struct_size = sizeof quant;
  quant.scaling = static_cast<uint32_t>(spec.scaling);
  quant.flags = spec.flags;
  quant.amax_epsilon = spec.epsilon;
  quant.columnwise_data = pointer(col_data);
  quant.scale_inv = pointer(scale_inv);
  quant.columnwise_scale_inv = pointer(col_scale_inv);
  quant.amax = reinterpret_cast<float*>(pointer(amax));
  quant.scale = reinterpret_cast<float*>(pointer(scale));
  c.quant = &quant;
}

Fill gaussian(double sigma, double mean) {
  return [=](Random& r, int64_t i) {
    const double x = mean + sigma * r.gaussian();
    if (i % 8 != 5 || x == 0) return x;
    const int bits = 2 + static_cast<int>(i / 8 % 4);
    int exponent;
    const double m = std::frexp(x, &exponent);
    return std::ldexp(std::round(std::ldexp(m, bits)), exponent - bits);
  };
}
Fill constant(double value) {
  return [=](Random&, int64_t) { return value; };
}
Fill integers(int64_t bound) {
  return [=](Random& r, int64_t) { return static_cast<double>(r.below(bound)); };
}

namespace {
// Allocates memory for each array that the spec requires (data, scales, amax), filled with the
// poison pattern.
void allocate(Tensor& t) {
  const Spec& s = t.spec;
  if (s.row && t.data == nullptr) t.data = make_poisoned(s.dtype, t.numel());
  if (!s.quantised()) return;
  if (s.col) t.col_data = make_poisoned(s.dtype, t.numel());
  for (bool col : {false, true}) {
    const CopyLayout at(s.scaling, col, t.rows(), t.cols());
    if (s.scaling == TE_FL_SCALING_TENSOR) {
      t.scale_inv = t.scale_inv == nullptr ? make_poisoned(TE_FL_F32, 1) : t.scale_inv;
    } else if (col ? s.col : s.row) {
      (col ? t.col_scale_inv : t.scale_inv) = make_poisoned(at.scale_dtype, at.scales());
    }
  }
  if (s.scaling == TE_FL_SCALING_TENSOR || s.scaling == TE_FL_SCALING_NVFP4) {
    if (s.has_amax) t.amax = make_poisoned(TE_FL_F32, 1);
    // The op overwrites this amax instead of updating a running maximum, so its previous value must
    // not matter.
    if (t.amax != nullptr) store(TE_FL_F32, t.amax->data(), 0, kLargeAmax);
  }
  if (s.scaling != TE_FL_SCALING_TENSOR) return;
  t.scale = make_poisoned(TE_FL_F32, 1);
  if (!s.current()) {
    store(TE_FL_F32, t.scale->data(), 0, static_cast<double>(s.scale));
    if (t.amax != nullptr) store(TE_FL_F32, t.amax->data(), 0, static_cast<double>(s.amax_before));
  }
}

void freeze(Tensor& t) {
  for (Buffer* b : t.buffers()) b->freeze();
  t.bind();
}

// Quantises random data into the arrays that the spec requires, by the exact rules of
// oracle_quantize.hpp.
void put_quantised(Tensor& t, const Fill& fill, Random& random) {
  std::vector<double> x(static_cast<size_t>(t.numel()));
  for (int64_t i = 0; i < t.numel(); ++i) x[i] = static_cast<float>(fill(random, i));
  const QuantImage image = quantise_exact(x, t.rows(), t.cols(), t.spec, TE_FL_F32);
  auto put = [](const std::vector<uint8_t>& from, const std::shared_ptr<Buffer>& to) {
    if (to != nullptr && !from.empty()) std::copy(from.begin(), from.end(), to->data());
  };
  put(image.data, t.data), put(image.col_data, t.col_data);
  put(t.spec.row ? image.scale_inv : image.col_scale_inv,
      t.spec.row || t.spec.scaling == TE_FL_SCALING_TENSOR ? t.scale_inv : nullptr);
  put(image.col_scale_inv, t.col_scale_inv);
  if (t.amax != nullptr) store(TE_FL_F32, t.amax->data(), 0, static_cast<double>(image.amax));
  if (t.scale != nullptr) store(TE_FL_F32, t.scale->data(), 0, static_cast<double>(image.scale));
}
}  // namespace

Tensor* Problem::strided(const std::string& name, Role role, Spec spec, const Dims& shape,
                         const Dims& strides, const Fill& fill, std::shared_ptr<Buffer> storage,
                         int64_t offset, int64_t storage_elements) {
  auto t = std::make_unique<Tensor>();
  t->name = name, t->role = role, t->spec = spec, t->shape = shape, t->strides = strides,
  t->offset = offset;
  if (storage == nullptr && storage_elements > 0)
    storage = make_poisoned(spec.dtype, storage_elements);
  t->data = std::move(storage);
  allocate(*t);
  if (fills && role != Role::kOut)
    for (int64_t i = 0; i < t->numel(); ++i) t->put(i, fill(random, i));
  freeze(*t);
  singles[name] = t.get();
  tensors.push_back(std::move(t));
  return tensors.back().get();
}
Tensor* Problem::in(const std::string& name, Spec spec, const Dims& shape, const Fill& fill) {
  return strided(name, Role::kIn, spec, shape, {}, fill);
}
Tensor* Problem::out(const std::string& name, Spec spec, const Dims& shape) {
  return strided(name, Role::kOut, spec, shape, {}, constant(0));
}
Tensor* Problem::inout(const std::string& name, Spec spec, const Dims& shape, const Fill& fill) {
  return strided(name, Role::kInOut, spec, shape, {}, fill);
}
Tensor* Problem::in_place(const std::string& name, Tensor* input) {
  auto t = std::make_unique<Tensor>();
  t->name = name, t->role = Role::kInOut, t->spec = input->spec, t->shape = input->shape;
  t->strides = input->strides, t->offset = input->offset, t->data = input->data;
  input->role = Role::kInOut;
  t->bind();
  singles[name] = t.get();
  tensors.push_back(std::move(t));
  return tensors.back().get();
}
Tensor* Problem::quantised_in(const std::string& name, Spec spec, const Dims& shape,
                              const Fill& fill) {
  if (!spec.quantised()) return in(name, spec, shape, fill);
  auto t = std::make_unique<Tensor>();
  t->name = name, t->role = Role::kIn, t->spec = spec, t->shape = shape;
  allocate(*t);
  if (fills) put_quantised(*t, fill, random);
  // A tensor without elements has no scale that anything may read.
  if (fills && t->numel() == 0 && spec.scaling == TE_FL_SCALING_TENSOR && t->scale_inv != nullptr)
    store(TE_FL_F32, t->scale_inv->data(), 0, std::numeric_limits<double>::quiet_NaN());
  freeze(*t);
  singles[name] = t.get();
  tensors.push_back(std::move(t));
  return tensors.back().get();
}
Tensor* Problem::unnamed(Tensor* t) {
  singles.erase(t->name);
  return t;
}

void Problem::evaluate() {
  for (const auto& f : oracles) f();
  oracles.clear();
}
Expectation& Problem::expect(Tensor* t, std::vector<double> want, std::vector<double> extra) {
  Expectation e;
  e.kind = t->spec.quantised() ? Expectation::Kind::kQuantised : Expectation::Kind::kValues;
  e.tensor = t, e.want = std::move(want), e.extra = std::move(extra);
  if (static_cast<int64_t>(e.want.size()) != t->numel())
    throw std::logic_error(t->name + ": oracle of another size");
  expectations.push_back(std::move(e));
  return expectations.back();
}
Expectation& Problem::expect_exact(Tensor* t, std::vector<double> want, int input_dtype) {
  Expectation& e = expect(t, std::move(want));
  if (t->spec.quantised()) e.kind = Expectation::Kind::kExactQuantised;
  e.relative = 0, e.widen = 0, e.input_dtype = input_dtype;
  return e;
}
void Problem::expect_exact_copy(Tensor* t, const Tensor* result) {
  expect_exact(t, result->values(), result->spec.dtype).result = result;
}
Expectation& Problem::expect_dequantised(Tensor* t, std::vector<double> want,
                                         std::vector<double> extra) {
  Expectation& e = expect(t, std::move(want), std::move(extra));
  e.kind = Expectation::Kind::kDequantised;
  return e;
}
void Problem::expect_bytes(Tensor* t, std::vector<uint8_t> bytes) {
  Expectation e;
  e.kind = Expectation::Kind::kBytes, e.tensor = t, e.bytes = std::move(bytes);
  if (e.bytes.size() != t->data->size())
    throw std::logic_error(t->name + ": oracle of another size");
  expectations.push_back(std::move(e));
}
void Problem::set_rng(uint64_t seed, uint64_t offset, bool in_memory) {
  rng = {.seed = seed, .offset = offset};
  if (!in_memory) return;
  rng_state = {seed, ~offset, offset};  // seed and offset are not adjacent
  rng = {.seed = ~seed,                 // ignored: seed_address takes precedence
         .offset = 77,                  // the offsets add up
         .seed_address = &rng_state[0],
         .offset_address = &rng_state[2]};
}

void Problem::expect_unchanged(Tensor* t) {
  Expectation e;
  e.kind = Expectation::Kind::kUnchanged, e.tensor = t;
  expectations.push_back(std::move(e));
}
void Problem::expect_custom(Tensor* t, std::function<std::string(const Tensor&)> check) {
  Expectation e;
  e.kind = Expectation::Kind::kCustom, e.tensor = t, e.check = std::move(check);
  expectations.push_back(std::move(e));
}

std::string dims_name(const Dims& dims) {
  if (dims.empty()) return "scalar";
  std::string text;
  for (int64_t d : dims) text += (text.empty() ? "" : "x") + std::to_string(d);
  return text;
}

void add(Table& table, const std::string& family, const std::string& op, const std::string& rest,
         std::function<void(Problem&)> build, bool large, int ranks) {
  Case c;
  c.ranks = ranks;
  c.family = family, c.op = op, c.name = op + "/" + rest, c.large = large;
  c.seed = hash_text(c.name);
  c.build = std::move(build);
  table.push_back(std::move(c));
}

const std::vector<Spec>& quantised_specs() {
  constexpr uint32_t kCurrent = TE_FL_QUANT_COMPUTE_SCALE, kPow2 = TE_FL_QUANT_POW2_SCALE;
  constexpr int kE4 = TE_FL_F8E4M3, kE5 = TE_FL_F8E5M2;
  static const std::vector<Spec> specs = [] {
    Spec no_amax(kE4, TE_FL_SCALING_TENSOR, true, false);
    no_amax.has_amax = false;
    Spec small(kE5, TE_FL_SCALING_TENSOR, true, true);  // amax is larger than the result
    small.scale = 0.37f, small.amax_before = kLargeAmax;
    Spec rows(kE4, TE_FL_SCALING_TENSOR, true, false);
    Spec columns(kE4, TE_FL_SCALING_TENSOR, false, true);
    rows.amax_before = columns.amax_before = kLargeAmax;  // row-wise or column-wise data only
    return std::vector<Spec>{{kE4, TE_FL_SCALING_TENSOR, true, false},
                             {kE5, TE_FL_SCALING_TENSOR, true, false},
                             {kE4, TE_FL_SCALING_TENSOR, false, true},
                             {kE4, TE_FL_SCALING_TENSOR, true, true},
                             no_amax,
                             small,
                             {kE4, TE_FL_SCALING_TENSOR, true, false, kCurrent},
                             {kE5, TE_FL_SCALING_TENSOR, true, true, kCurrent},
                             {kE4, TE_FL_SCALING_TENSOR, false, true, kCurrent | kPow2},
                             {kE4, TE_FL_SCALING_TENSOR, true, true, kCurrent, 3e5f},
                             {kE4, TE_FL_SCALING_BLOCK_1X128, true, false, kPow2},
                             {kE4, TE_FL_SCALING_BLOCK_1X128, false, true, kPow2},
                             {kE4, TE_FL_SCALING_BLOCK_1X128, true, true},
                             {kE4, TE_FL_SCALING_BLOCK_1X128, true, true, kPow2, 3.0f},
                             {kE5, TE_FL_SCALING_BLOCK_1X128, true, true, kPow2},
                             {kE4, TE_FL_SCALING_BLOCK_128X128, true, false, kPow2},
                             {kE4, TE_FL_SCALING_BLOCK_128X128, false, true, kPow2},
                             {kE4, TE_FL_SCALING_BLOCK_128X128, true, true},
                             {kE4, TE_FL_SCALING_BLOCK_128X128, true, true, kPow2, 3e4f},
                             {kE4, TE_FL_SCALING_MXFP8, true, false},
                             {kE4, TE_FL_SCALING_MXFP8, false, true},
                             {kE4, TE_FL_SCALING_MXFP8, true, true},
                             {TE_FL_F4E2M1, TE_FL_SCALING_NVFP4, true, false},
                             {TE_FL_F4E2M1, TE_FL_SCALING_NVFP4, false, true},
                             {TE_FL_F4E2M1, TE_FL_SCALING_NVFP4, true, true},
                             rows,
                             columns};
  }();
  return specs;
}

}  // namespace te_fl::conformance
