#pragma once

// The conformance cases. One case is one call of one op: a function that builds its arguments from
// a fixed seed, equal on all platforms, and the expected outputs, computed in double precision from
// the inputs as they are stored. All implementations run the same cases. A file of
// cases/ lists the cases of some ops, their calls on huge tensors, and the calls whose speed is
// measured (case_file.hpp).

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "conformance/format.hpp"
#include "te_fl/ops/enums.h"
#include "te_fl/plugin.h"

namespace te_fl::conformance {

// A random generator that does not depend on a library: it gives the same sequence on every
// platform. A Gaussian number is the sum of twelve uniform ones.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x1234567u) {}
  uint64_t bits() {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  double gaussian() {
    double sum = -6;
    for (int i = 0; i < 6; ++i) {
      const uint64_t b = bits();
      sum += (static_cast<double>(b & 0xffffffffu) + static_cast<double>(b >> 32)) * 0x1p-32;
    }
    return sum;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }

 private:
  uint64_t state_;
};

// 256-byte aligned memory with guard bytes on both sides, and a copy of its initial contents.
class Buffer {
 public:
  Buffer(size_t bytes, uint8_t fill);
  uint8_t* data() { return base_ + kGuard; }
  const uint8_t* data() const { return base_ + kGuard; }
  size_t size() const { return size_; }
  uint8_t* whole() { return base_; }  // with the guard bytes
  size_t whole_size() const { return size_ + 2 * kGuard; }
  void freeze();   // stores the current contents as the initial ones
  void restore();  // restores the initial contents and guard bytes
  // Describes the first guard byte that was written: "byte 4 behind the end of its 68 bytes"; empty
  // if none was.
  std::string written_outside() const;
  bool unchanged() const;
  size_t first_change() const;  // the first byte that differs from the initial contents
  const uint8_t* initial() const { return initial_.data(); }

 private:
  static constexpr size_t kGuard = 256;
  std::vector<uint8_t> raw_;
  uint8_t* base_;
  size_t size_;
  std::vector<uint8_t> initial_;
};

// Memory for elements that an op must write. They are NaN in the float formats that have one, with
// bits that no operation gives a result of its own.
std::shared_ptr<Buffer> make_poisoned(int dtype, int64_t elements);

// The dtype and quantisation of a tensor.
struct Spec {
  int dtype = TE_FL_F32;
  int scaling = TE_FL_SCALING_NONE;
  bool row = true;
  bool col = false;
  uint32_t flags = 0;
  float epsilon = 0;
  bool has_amax = true;
  float scale = 150.0f;  // delayed scaling: the scale passed in
  float amax_before = 0.25f;

  Spec(int d = TE_FL_F32) : dtype(d) {}  // NOLINT: an unquantised dtype is a spec
  Spec(int d, int s, bool r, bool c, uint32_t f = 0, float e = 0)
      : dtype(d), scaling(s), row(r), col(c), flags(f), epsilon(e) {}
  bool quantised() const { return scaling != TE_FL_SCALING_NONE; }
  bool current() const { return (flags & TE_FL_QUANT_COMPUTE_SCALE) != 0; }
  bool pow2() const { return (flags & TE_FL_QUANT_POW2_SCALE) != 0; }
  std::string name() const;  // for example "f8e4m3.tensor.row+col"
};

enum class Role { kIn, kOut, kInOut };
using Dims = std::vector<int64_t>;

struct Tensor {
  std::string name;
  Role role = Role::kIn;
  Spec spec;
  Dims shape;
  Dims strides;        // empty: compact
  int64_t offset = 0;  // of the first element, counted in elements
  std::shared_ptr<Buffer> data, col_data, scale_inv, col_scale_inv, amax, scale;
  te_fl_quant quant{};
  te_fl_tensor c{};

  int64_t numel() const;
  int64_t rows() const;  // of the logical matrix: product of all extents but the last
  int64_t cols() const;
  int64_t index(int64_t i) const;  // storage index of logical element i
  double get(int64_t i) const { return load(spec.dtype, data->data(), index(i)); }
  void put(int64_t i, double x) { store(spec.dtype, data->data(), index(i), x); }
  std::vector<double> values() const;  // of an unquantised tensor, in logical order
  std::vector<Buffer*> buffers() const;
  void bind();  // fills the C structs
};

// The expected contents of an output.
struct Expectation {
  enum class Kind {
    kValues,
    kQuantised,
    kExactQuantised,
    kDequantised,
    kBytes,
    kUnchanged,
    kCustom
  } kind;
  Tensor* tensor = nullptr;
  std::vector<double> want;   // expected values; for quantised kinds before quantisation
  std::vector<double> extra;  // absolute tolerance per element, added; empty: none
  double relative =
      0;  // >0: replaces the dtype's tolerance: |got - want| <= extra + relative * |want|
  double widen = 1;           // factor on the dtype's relative tolerance
  std::vector<uint8_t> skip;  // not 0: the element is not compared
  std::vector<uint8_t> bytes;
  int input_dtype =
      TE_FL_F32;  // exact quantisation: dtype whose largest value replaces an infinite block scale
  std::function<std::string(const Tensor&)> check;  // kCustom: empty string if right
  const Tensor* result = nullptr;  // not null: `want` is read from this output after the call
};

using Fill = std::function<double(Random&, int64_t)>;
// Gaussian numbers, of which every eighth has at most five significant bits: scaled by a power of
// two, many of these are half way between two codes.
Fill gaussian(double sigma = 1, double mean = 0);
Fill constant(double value);
Fill integers(int64_t bound);  // uniform in [0, bound)

// A case whose arguments have been built in memory. evaluate() computes the expected outputs.
class Problem {
 public:
  Problem(std::string op, uint64_t seed) : op_name(std::move(op)), random(seed) {}

  Tensor* in(const std::string& name, Spec spec, const Dims& shape, const Fill& fill = gaussian());
  Tensor* out(const std::string& name, Spec spec, const Dims& shape);
  Tensor* inout(const std::string& name, Spec spec, const Dims& shape,
                const Fill& fill = gaussian());
  Tensor* strided(const std::string& name, Role role, Spec spec, const Dims& shape,
                  const Dims& strides, const Fill& fill = gaussian(),
                  std::shared_ptr<Buffer> storage = nullptr, int64_t offset = 0,
                  int64_t storage_elements = 0);
  // Adds an output in the memory of `input`, which then counts as overwritten.
  Tensor* in_place(const std::string& name, Tensor* input);
  // Adds an input that is quantised from `fill` by the exact rules. dequantised() returns its
  // values.
  Tensor* quantised_in(const std::string& name, Spec spec, const Dims& shape,
                       const Fill& fill = gaussian());
  void list(const std::string& name, std::vector<Tensor*> tensors) {
    lists[name] = std::move(tensors);
  }
  Tensor* unnamed(Tensor* t);  // removes a tensor from the single arguments, for use in a list
  void set(const std::string& name, double value) { scalars[name] = value; }
  // Sets an argument that is a list of numbers.
  void list(const std::string& name, std::vector<int64_t> numbers) {
    number_lists[name] = std::move(numbers);
  }

  // Sets the RNG seed and offset of the call. `in_memory`: passes them by address; the direct seed
  // then has to be ignored, and the direct offset added.
  void set_rng(uint64_t seed, uint64_t offset, bool in_memory);

  void oracle(std::function<void()> f) { oracles.push_back(std::move(f)); }
  void evaluate();
  Expectation& expect(Tensor* t, std::vector<double> want, std::vector<double> extra = {});
  // Expects the result of several quantised steps (FP8 attention). Compares after dequantisation
  // with a tolerance of 1e-2 + 1e-2 |v| + one code step + `extra`.
  Expectation& expect_dequantised(Tensor* t, std::vector<double> want,
                                  std::vector<double> extra = {});
  Expectation& expect_exact(Tensor* t, std::vector<double> want, int input_dtype);
  // Expects the exact quantisation of `result`, an unquantised output of the same call, with its
  // contents after the call.
  void expect_exact_copy(Tensor* t, const Tensor* result);
  void expect_bytes(Tensor* t, std::vector<uint8_t> bytes);
  void expect_unchanged(Tensor* t);
  void expect_custom(Tensor* t, std::function<std::string(const Tensor&)> check);
  void expect_error(int code, std::string text) { want_code = code, want_text = std::move(text); }

  std::string op_name;  // for a collective: this rank's op, such as recv; empty: none
  Random random;
  // False: tensors get shapes and types but no values, for callers that need only these.
  bool fills = true;
  int rank = 0, ranks = 0;                   // for a collective; ranks is 0 for other ops
  const te_fl_communicator* comm = nullptr;  // for a collective, during its run
  std::vector<std::unique_ptr<Tensor>> tensors;
  std::map<std::string, Tensor*> singles;
  std::map<std::string, std::vector<Tensor*>> lists;
  std::map<std::string, double> scalars;
  std::map<std::string, std::vector<int64_t>> number_lists;
  std::vector<std::function<void()>> oracles;
  std::vector<Expectation> expectations;
  te_fl_rng rng;
  std::vector<uint64_t> rng_state;
  int want_code = 0;        // expected error code; outputs must then be unchanged
  std::string want_text;    // must be part of the error's text
  bool late_error = false;  // the error is in values, so a device may report it at a later wait
  std::string may_refuse;   // not empty: a refusal whose text contains this is right too
  int64_t saved_storage = -1;
};

struct Case {
  std::string family;
  std::string op;
  std::string name;  // for example "gelu/f32/7x33/out=f8e4m3.tensor.row+col"
  uint64_t seed = 0;
  bool large = false;
  bool for_devices = false;  // a size for what a device runs at once, which takes a host seconds
  // For a collective: the number of ranks. Each rank has a problem of its own, and all run
  // together. 0: not a collective.
  int ranks = 0;
  std::function<void(Problem&)> build;
};

using Table = std::vector<Case>;
class Drawn;  // draws random cases (conformance/drawn.hpp)

// Adds cases with NaN and infinities, made from the cases in the table.
void add_special_cases(Table&);
// Puts NaN and infinities into the inputs of large sweep cases of many rows, or of long ones.
void put_special_values(Table& sweep);
// The complete table. Names are unique.
Table all_cases();

// Random cases with shapes and types drawn from `seed`: `per_op` cases for each op that supports
// arbitrary shapes. Names begin with OP/fuzz/.
Table fuzz_cases(uint64_t seed, int per_op);
// The sweep cases of one op: all row lengths from 1 to 300 and powers of two up to 16384, with one
// to eight rows, and large cases of 70,003 rows, of rows of 70,001 columns and of 1,058,837
// elements. Dtypes are F32, BF16, F16, and, if the op's output may be quantised, all quantised
// formats in turn. About a thousand small cases. Empty for an op whose cases have
// no rows (get_fused_attn_backend). Names begin with OP/sweep/.
// The arguments are drawn from `seed`. `thorough`: four cases of each size instead of one, and
// sizes of more than 2^24 elements.
Table sweep_cases(const std::string& op, uint64_t seed = 1, bool thorough = false);

uint64_t hash_text(const std::string& text);  // equal on all platforms
std::string dims_name(const Dims& dims);      // for example "7x33"; "scalar"
void add(Table& table, const std::string& family, const std::string& op, const std::string& rest,
         std::function<void(Problem&)> build, bool large = false, int ranks = 0);
// The dtypes and scaling modes of quantised outputs that the cases use.
const std::vector<Spec>& quantised_specs();

}  // namespace te_fl::conformance
