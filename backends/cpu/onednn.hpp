// oneDNN's GEMMs. The library is opened on first use and called single-threaded.
//
// The library is not linked, because loading it and running its constructors would slow the start
// of every program that links libte_fl, and its first GEMM generates code for tens of milliseconds.
// It is built on OpenMP, whose thread count is a per-thread setting. The calls below set it to one
// and restore it afterwards, so no OpenMP thread is started for te-fl, and an application's own use
// of OpenMP or oneDNN is not affected.
#pragma once

#include <cstdint>
#include <string>

namespace te_fl::cpu {

class OneDnn {
 public:
  // Opens the library on the first call. Thread-safe. If it cannot be opened, every call throws
  // std::runtime_error; the message names the file and the package.
  static const OneDnn& instance();

  // True if instance() succeeds; otherwise `reason` receives the cause. Opens the library.
  static bool available(std::string* reason);

  // True if the library and the processor support BF16 GEMMs natively. Otherwise bf16() must not be
  // called.
  bool has_bf16() const { return has_bf16_; }

  // Computes C = alpha op(A) op(B) + beta C, row-major, on the calling thread. Dimensions must be
  // positive and leading dimensions valid. C is not read if beta is 0. Thread-safe. fork() and
  // exit() in other threads wait until the call returns. Throws std::runtime_error after exit() has
  // begun.
  void sgemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
             const float* a, int64_t lda, const float* b, int64_t ldb, float beta, float* c,
             int64_t ldc) const;

  // C = op(A) op(B), with A and B as BF16 bit patterns and with C and the sums in FP32. Otherwise
  // like sgemm().
  void bf16(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, const uint16_t* a,
            int64_t lda, const uint16_t* b, int64_t ldb, float* c, int64_t ldc) const;

 private:
  struct Api;
  struct Bf16;

  OneDnn();
  void open();
  void prepare();
  // Implementations of sgemm() and bf16(), for callers that already make fork() and exit() wait.
  void make_sgemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                  const float* a, int64_t lda, const float* b, int64_t ldb, float beta, float* c,
                  int64_t ldc) const;
  void make_bf16(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, const uint16_t* a,
                 int64_t lda, const uint16_t* b, int64_t ldb, float* c, int64_t ldc) const;

  const Api* api_ = nullptr;  // never closed: exit handlers of its threads may run later
  const Bf16* bf16_ = nullptr;
  bool has_bf16_ = false;
  std::string error_;
};

}  // namespace te_fl::cpu
