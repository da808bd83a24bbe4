// oneDNN's GEMMs, opened at the first use and called single-threaded.
//
// The library is not linked: mapping it and running its constructors would slow the start of every
// program that links libte_fl, and its first GEMM generates code for tens of milliseconds. It is
// built on OpenMP, whose thread count is a per-thread setting; the calls below set it to one for
// their duration and put it back, so no OpenMP thread is ever started for te-fl and a host
// application's own use of OpenMP or oneDNN is not disturbed.
#pragma once

#include <cstdint>
#include <string>

namespace te_fl::cpu {

class OneDnn {
 public:
  // Opens the library at the first call. Thread-safe. Throws std::runtime_error, at every call,
  // when it cannot be opened; the message names the file and the package.
  static const OneDnn& instance();

  // True if instance() succeeds, and why not. Opens the library.
  static bool available(std::string* reason);

  // True if bf16() runs at the processor's BF16 speed. Otherwise it must not be called.
  bool has_bf16() const { return has_bf16_; }

  // C = alpha op(A) op(B) + beta C, row-major, on the calling thread. Dimensions are positive and
  // leading dimensions valid. C is not read if beta is 0. Any thread may call; a fork, and the end
  // of the process, wait for the call. Throws std::runtime_error once the process is ending.
  void sgemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
             const float* a, int64_t lda, const float* b, int64_t ldb, float beta, float* c,
             int64_t ldc) const;

  // C = op(A) op(B) with A and B in BF16 (as their bit patterns), C and sums in FP32; else as
  // above.
  void bf16(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, const uint16_t* a,
            int64_t lda, const uint16_t* b, int64_t ldb, float* c, int64_t ldc) const;

 private:
  struct Api;
  struct Bf16;

  OneDnn();
  void open();
  void prepare();
  // sgemm() and bf16() for callers that keep a fork and the end of the process waiting.
  void make_sgemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                  const float* a, int64_t lda, const float* b, int64_t ldb, float beta, float* c,
                  int64_t ldc) const;
  void make_bf16(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, const uint16_t* a,
                 int64_t lda, const uint16_t* b, int64_t ldb, float* c, int64_t ldc) const;

  const Api* api_ = nullptr;  // Never closed: its threads' exit handlers would outlive it.
  const Bf16* bf16_ = nullptr;
  bool has_bf16_ = false;
  std::string error_;
};

}  // namespace te_fl::cpu
