#include "onednn.hpp"

#include <dlfcn.h>
#include <oneapi/dnnl/dnnl.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

// The soname of the oneDNN library that belongs to the headers. The build sets it from the file
// itself, because it differs between distributions: libdnnl.so.2 on Debian 12, libdnnl.so.3 or .3.x
// on later ones.
#ifndef TE_FL_ONEDNN_SONAME
#define TE_FL_STRING_(x) #x
#define TE_FL_STRING(x) TE_FL_STRING_(x)
#define TE_FL_ONEDNN_SONAME "libdnnl.so." TE_FL_STRING(DNNL_VERSION_MAJOR)
#endif

namespace te_fl::cpu {
namespace {

constexpr const char* kSoname = TE_FL_ONEDNN_SONAME;
constexpr int64_t kSmall = 16;  // extent of the small GEMMs of ready()

void check(dnnl_status_t status, const char* what) {
  if (status == dnnl_success) return;
  throw std::runtime_error(std::string("oneDNN: ") + what + " failed with status " +
                           std::to_string(static_cast<int>(status)));
}

// The number of threads inside the library. fork() and exit() wait until it is 0: a forked child
// would inherit locked mutexes whose owners do not exist in the child, and exit() destroys the
// library's static objects, which a running GEMM may use. A thread that calls the library during a
// fork waits until the fork ends; after exit() has begun, the call fails.
constinit std::atomic<int> inside{0};
constinit thread_local int t_inside = 0;  // 1 only if a signal handler inside the library forks or
                                          // exits
enum Gate : int { kOpen, kForking, kEnded };
constinit std::atomic<int> gate{kOpen};

void close_gate(Gate why) {
  int open = kOpen;
  if (!gate.compare_exchange_strong(open, why) && why == kEnded) gate.store(kEnded);
  while (inside.load() != t_inside) std::this_thread::yield();
}
void open_gate() {
  int forking = kForking;
  gate.compare_exchange_strong(forking, kOpen);
}

[[noreturn]] void refuse_at_end() {
  throw std::runtime_error("the process is ending: oneDNN can no longer run products");
}

class Inside {
 public:
  Inside() {
    for (;; std::this_thread::yield()) {
      inside.fetch_add(1);
      const int now = gate.load();
      if (now == kOpen) break;
      inside.fetch_sub(1);
      if (now == kEnded) refuse_at_end();
    }
    ++t_inside;
  }
  ~Inside() {
    --t_inside;
    inside.fetch_sub(1);
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
};

// Locked while the library is opened and generates code. fork() and exit() wait for this mutex, so
// that a child never inherits a half-opened library or the dynamic linker's lock.
std::mutex opening;
constinit thread_local bool t_opening = false;
// True once the thread that loaded te-fl has ended. This is usually the main thread, so its end
// usually means that the process is exiting.
constinit std::atomic<bool> loader_ended{false};

class Opening {
 public:
  Opening() {
    t_opening = true;  // set first: a signal handler that exits must not wait for its own thread
    opening.lock();
    if (!loader_ended.exchange(false)) return;
    opening.unlock();
    for (int ms = 0; ms < 100 && gate.load() != kEnded; ++ms) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    opening.lock();
  }
  ~Opening() {
    opening.unlock();
    t_opening = false;
  }
  Opening(const Opening&) = delete;
  Opening& operator=(const Opening&) = delete;
};

void before_fork() {
  if (!t_opening) opening.lock();
  close_gate(kForking);
}
void after_fork() {
  open_gate();
  if (!t_opening) opening.unlock();
}
[[maybe_unused]] const int forks_registered = pthread_atfork(&before_fork, &after_fork, [] {
  inside.store(t_inside);  // threads that were about to check the gate do not exist in the child
  after_fork();
});

// Registered after the library has created its static objects, so it runs before they are
// destroyed.
void before_exit() {
  std::unique_lock<std::mutex> lock(opening, std::defer_lock);
  if (!t_opening) lock.lock();
  close_gate(kEnded);
}

// exit() destroys the thread-local objects of its thread before it runs the atexit() handlers. An
// EndOfLoader is a thread-local object of the thread that loads te-fl, usually the main thread. If
// another thread is making the library create static objects, the destructor waits for it, and then
// registers before_exit(), which therefore runs before these objects are destroyed.
struct EndOfLoader {
  bool watches = false;
  ~EndOfLoader() {
    if (!watches || t_opening) return;
    const Opening lock;
    std::atexit(&before_exit);
    loader_ended.store(true);
  }
};
thread_local EndOfLoader t_end;
[[maybe_unused]] const bool end_watched = t_end.watches = true;

// The library creates static objects when a kind of GEMM (dtype, transpositions, shape class, beta)
// runs for the first time. On the first request for a kind, calls `product`, a small GEMM of this
// kind, and then registers before_exit(), before the program's own GEMM runs.
template <class Product>
void ready(bool bf16, bool trans_a, bool trans_b, bool row, bool column, float beta,
           Product&& product) {
  static constinit std::atomic<uint64_t> kinds{0};
  const int sum = bf16 ? 3 : beta == 0.0f ? 0 : beta == 1.0f ? 1 : 2;
  const int kind = sum * 16 + trans_a * 8 + trans_b * 4 + row * 2 + column;
  const uint64_t bit = uint64_t{1} << kind;
  if ((kinds.load(std::memory_order_acquire) & bit) != 0) return;
  const Opening lock;
  if ((kinds.load(std::memory_order_relaxed) & bit) != 0) return;
  if (gate.load() == kEnded) refuse_at_end();
  product();
  std::atexit(&before_exit);
  kinds.fetch_or(bit, std::memory_order_release);
}

// Not a function-local static: a fork could interrupt its initialisation, and the child would block
// for ever.
std::atomic<const OneDnn*> opened{nullptr};

}  // namespace

struct OneDnn::Api {
  explicit Api(void* library);

  template <typename F>
  static void find(void* library, const char* name, F* function) {
    *function = reinterpret_cast<F>(dlsym(library, name));
    if (*function == nullptr) {
      throw std::runtime_error(std::string(kSoname) + " has no symbol " + name);
    }
  }

  decltype(&::dnnl_sgemm) sgemm;
  decltype(&::dnnl_engine_create) engine_create;
  decltype(&::dnnl_stream_create) stream_create;
  decltype(&::dnnl_stream_destroy) stream_destroy;
  decltype(&::dnnl_memory_create) memory_create;
  decltype(&::dnnl_memory_destroy) memory_destroy;
  decltype(&::dnnl_memory_desc_get_size) memory_desc_get_size;
  decltype(&::dnnl_primitive_attr_create) attr_create;
  decltype(&::dnnl_primitive_attr_destroy) attr_destroy;
  decltype(&::dnnl_primitive_attr_set_scratchpad_mode) attr_set_scratchpad_mode;
  decltype(&::dnnl_primitive_desc_query) desc_query;
  decltype(&::dnnl_primitive_desc_query_md) desc_query_md;
  decltype(&::dnnl_primitive_desc_destroy) desc_destroy;
  decltype(&::dnnl_primitive_create) primitive_create;
  decltype(&::dnnl_primitive_execute) primitive_execute;
#if DNNL_VERSION_MAJOR >= 3
  decltype(&::dnnl_memory_desc_create_with_strides) memory_desc_create;
  decltype(&::dnnl_memory_desc_destroy) memory_desc_destroy;
  decltype(&::dnnl_matmul_primitive_desc_create) matmul_desc_create;
#else
  decltype(&::dnnl_memory_desc_init_by_strides) memory_desc_init;
  decltype(&::dnnl_matmul_desc_init) matmul_desc_init;
  decltype(&::dnnl_primitive_desc_create) desc_create;
#endif
  int (*omp_get_max_threads)();
  void (*omp_set_num_threads)(int);
};

OneDnn::Api::Api(void* library) {
  find(library, "dnnl_sgemm", &sgemm);
  find(library, "dnnl_engine_create", &engine_create);
  find(library, "dnnl_stream_create", &stream_create);
  find(library, "dnnl_stream_destroy", &stream_destroy);
  find(library, "dnnl_memory_create", &memory_create);
  find(library, "dnnl_memory_destroy", &memory_destroy);
  find(library, "dnnl_memory_desc_get_size", &memory_desc_get_size);
  find(library, "dnnl_primitive_attr_create", &attr_create);
  find(library, "dnnl_primitive_attr_destroy", &attr_destroy);
  find(library, "dnnl_primitive_attr_set_scratchpad_mode", &attr_set_scratchpad_mode);
  find(library, "dnnl_primitive_desc_query", &desc_query);
  find(library, "dnnl_primitive_desc_query_md", &desc_query_md);
  find(library, "dnnl_primitive_desc_destroy", &desc_destroy);
  find(library, "dnnl_primitive_create", &primitive_create);
  find(library, "dnnl_primitive_execute", &primitive_execute);
#if DNNL_VERSION_MAJOR >= 3
  find(library, "dnnl_memory_desc_create_with_strides", &memory_desc_create);
  find(library, "dnnl_memory_desc_destroy", &memory_desc_destroy);
  find(library, "dnnl_matmul_primitive_desc_create", &matmul_desc_create);
#else
  find(library, "dnnl_memory_desc_init_by_strides", &memory_desc_init);
  find(library, "dnnl_matmul_desc_init", &matmul_desc_init);
  find(library, "dnnl_primitive_desc_create", &desc_create);
#endif
  // Finds the OpenMP runtime that oneDNN uses. A runtime that the program has loaded globally, such
  // as LLVM's, takes precedence over the libgomp that oneDNN is linked to.
  const auto omp = [&](const char* name) {
    return dlsym(RTLD_DEFAULT, name) ? RTLD_DEFAULT : library;
  };
  find(omp("omp_get_max_threads"), "omp_get_max_threads", &omp_get_max_threads);
  find(omp("omp_set_num_threads"), "omp_set_num_threads", &omp_set_num_threads);
}

namespace {

// While an object of this class exists, oneDNN calls of this thread use one OpenMP thread.
template <typename Api>
class OneThread {
 public:
  explicit OneThread(const Api& api) : api_(api), before_(api.omp_get_max_threads()) {
    if (before_ != 1) api_.omp_set_num_threads(1);
  }
  ~OneThread() {
    if (before_ != 1) api_.omp_set_num_threads(before_);
  }

 private:
  const Api& api_;
  const int before_;
};

// A two-dimensional memory descriptor, for both major versions of the library.
template <typename Api>
class Layout {
 public:
  Layout(const Api& api, dnnl_data_type_t type, int64_t rows, int64_t columns, int64_t row_stride,
         int64_t column_stride)
      : api_(api) {
    const dnnl_dims_t dims = {rows, columns};
    const dnnl_dims_t strides = {row_stride, column_stride};
#if DNNL_VERSION_MAJOR >= 3
    check(api_.memory_desc_create(&desc_, 2, dims, type, strides), "describing a matrix");
#else
    check(api_.memory_desc_init(&desc_, 2, dims, type, strides), "describing a matrix");
#endif
  }
#if DNNL_VERSION_MAJOR >= 3
  ~Layout() { api_.memory_desc_destroy(desc_); }
  const_dnnl_memory_desc_t get() const { return desc_; }
#else
  const dnnl_memory_desc_t* get() const { return &desc_; }
#endif
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;

 private:
  const Api& api_;
  dnnl_memory_desc_t desc_{};
};

template <typename Api>
class Memory {
 public:
  Memory(const Api& api, const Layout<Api>& layout, dnnl_engine_t engine, const void* data)
      : api_(api) {
    check(api_.memory_create(&memory_, layout.get(), engine, const_cast<void*>(data)),
          "wrapping a matrix");
  }
  ~Memory() { api_.memory_destroy(memory_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  dnnl_memory_t get() const { return memory_; }

 private:
  const Api& api_;
  dnnl_memory_t memory_ = nullptr;
};

bool processor_has_bf16() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

}  // namespace

// One matmul primitive per pair of transpositions, with all sizes determined at run time. Calls
// therefore generate no code, do not take the library's cache lock, and use no memory per shape.
struct OneDnn::Bf16 {
  dnnl_engine_t engine = nullptr;
  dnnl_primitive_t product[2][2] = {};

  explicit Bf16(const Api& api);
  static dnnl_primitive_desc_t describe(const Api& api, dnnl_engine_t engine, bool trans_a,
                                        bool trans_b);
};

dnnl_primitive_desc_t OneDnn::Bf16::describe(const Api& api, dnnl_engine_t engine, bool trans_a,
                                             bool trans_b) {
  constexpr int64_t kOpen = DNNL_RUNTIME_DIM_VAL;
  const Layout<Api> a(api, dnnl_bf16, kOpen, kOpen, trans_a ? 1 : kOpen, trans_a ? kOpen : 1);
  const Layout<Api> b(api, dnnl_bf16, kOpen, kOpen, trans_b ? 1 : kOpen, trans_b ? kOpen : 1);
  const Layout<Api> c(api, dnnl_f32, kOpen, kOpen, kOpen, 1);
  dnnl_primitive_attr_t attr = nullptr;
  check(api.attr_create(&attr), "creating attributes");
  // Uses a caller-provided scratchpad, because the library's own does not allow concurrent calls.
  dnnl_status_t status = api.attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user);
  dnnl_primitive_desc_t desc = nullptr;
#if DNNL_VERSION_MAJOR >= 3
  if (status == dnnl_success) {
    status = api.matmul_desc_create(&desc, engine, a.get(), b.get(), nullptr, c.get(), attr);
  }
#else
  dnnl_matmul_desc_t matmul;
  if (status == dnnl_success) {
    status = api.matmul_desc_init(&matmul, a.get(), b.get(), nullptr, c.get());
  }
  if (status == dnnl_success) status = api.desc_create(&desc, &matmul, attr, engine, nullptr);
#endif
  api.attr_destroy(attr);
  check(status, "describing a BF16 product");
  return desc;
}

OneDnn::Bf16::Bf16(const Api& api) {
  check(api.engine_create(&engine, dnnl_cpu, 0), "creating an engine");
  for (const bool trans_a : {false, true}) {
    for (const bool trans_b : {false, true}) {
      dnnl_primitive_desc_t desc = describe(api, engine, trans_a, trans_b);
      const char* name = "";
      api.desc_query(desc, dnnl_query_impl_info_str, 0, static_cast<void*>(&name));
      const auto* scratchpad = api.desc_query_md(desc, dnnl_query_scratchpad_md, 0);
      const size_t scratch_bytes = scratchpad ? api.memory_desc_get_size(scratchpad) : 0;
      const bool fast = std::string(name).find("ref") == std::string::npos;
      const dnnl_status_t status = fast && scratch_bytes == 0
                                       ? api.primitive_create(&product[trans_a][trans_b], desc)
                                       : dnnl_unimplemented;
      api.desc_destroy(desc);
      check(status, "creating a BF16 product");
    }
  }
}

OneDnn::OneDnn() {
  try {
    open();
    prepare();
  } catch (const std::exception& error) {
    error_ = error.what();
  }
}

void OneDnn::open() {
  void* library = dlopen(kSoname, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == nullptr) {
    const char* why = dlerror();
    throw std::runtime_error(
        "the GEMM library oneDNN cannot be opened: " + std::string(why ? why : kSoname) +
        "; install it with apt-get install libdnnl-dev");
  }
  static const Api api(library);
  api_ = &api;
}

// Makes the library generate its code now, while the lock that fork() waits for is held.
void OneDnn::prepare() {
  const OneThread<Api> one_thread(*api_);
  float a[16] = {};
  float b[16] = {};
  float c[16] = {};
  api_->sgemm('N', 'N', 4, 4, 4, 1.0f, a, 4, b, 4, 0.0f, c, 4);
  if (!processor_has_bf16()) return;
  try {
    static const Bf16 products(*api_);
    bf16_ = &products;
    has_bf16_ = true;
  } catch (const std::exception&) {
    // This version of the library does not support BF16. GEMMs then use FP32, with the same results
    // but slower.
  }
}

const OneDnn& OneDnn::instance() {
  const OneDnn* library = opened.load(std::memory_order_acquire);
  if (library == nullptr) {
    const Opening lock;
    library = opened.load(std::memory_order_relaxed);
    if (library == nullptr) {
      if (gate.load() == kEnded) refuse_at_end();
      alignas(OneDnn) static unsigned char storage[sizeof(OneDnn)];
      library = new (storage) OneDnn();
      std::atexit(&before_exit);
      opened.store(library, std::memory_order_release);
    }
  }
  if (!library->error_.empty()) throw std::runtime_error(library->error_);
  return *library;
}

bool OneDnn::available(std::string* reason) {
  try {
    instance();
    return true;
  } catch (const std::exception& error) {
    if (reason != nullptr) *reason = error.what();
    return false;
  }
}

void OneDnn::sgemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                   const float* a, int64_t lda, const float* b, int64_t ldb, float beta, float* c,
                   int64_t ldc) const {
  ready(false, trans_a, trans_b, m == 1, n == 1, beta, [&] {
    float zeros[kSmall * kSmall] = {}, result[kSmall * kSmall] = {};
    make_sgemm(trans_a, trans_b, m == 1 ? 1 : kSmall, n == 1 ? 1 : kSmall, kSmall, alpha, zeros,
               kSmall, zeros, kSmall, beta, result, kSmall);
  });
  const Inside in_library;
  make_sgemm(trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void OneDnn::make_sgemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                        const float* a, int64_t lda, const float* b, int64_t ldb, float beta,
                        float* c, int64_t ldc) const {
  const OneThread<Api> one_thread(*api_);
  check(api_->sgemm(trans_a ? 'T' : 'N', trans_b ? 'T' : 'N', m, n, k, alpha, a, lda, b, ldb, beta,
                    c, ldc),
        "sgemm");
}

void OneDnn::bf16(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, const uint16_t* a,
                  int64_t lda, const uint16_t* b, int64_t ldb, float* c, int64_t ldc) const {
  ready(true, trans_a, trans_b, m == 1, n == 1, 0.0f, [&] {
    const uint16_t zeros[kSmall * kSmall] = {};
    float result[kSmall * kSmall];
    make_bf16(trans_a, trans_b, m == 1 ? 1 : kSmall, n == 1 ? 1 : kSmall, kSmall, zeros, kSmall,
              zeros, kSmall, result, kSmall);
  });
  const Inside in_library;
  make_bf16(trans_a, trans_b, m, n, k, a, lda, b, ldb, c, ldc);
}

void OneDnn::make_bf16(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k,
                       const uint16_t* a, int64_t lda, const uint16_t* b, int64_t ldb, float* c,
                       int64_t ldc) const {
  const OneThread<Api> one_thread(*api_);
  const Layout<Api> layout_a(*api_, dnnl_bf16, m, k, trans_a ? 1 : lda, trans_a ? lda : 1);
  const Layout<Api> layout_b(*api_, dnnl_bf16, k, n, trans_b ? 1 : ldb, trans_b ? ldb : 1);
  const Layout<Api> layout_c(*api_, dnnl_f32, m, n, ldc, 1);
  const Memory<Api> memory_a(*api_, layout_a, bf16_->engine, a);
  const Memory<Api> memory_b(*api_, layout_b, bf16_->engine, b);
  const Memory<Api> memory_c(*api_, layout_c, bf16_->engine, c);
  const dnnl_exec_arg_t arguments[] = {{DNNL_ARG_SRC, memory_a.get()},
                                       {DNNL_ARG_WEIGHTS, memory_b.get()},
                                       {DNNL_ARG_DST, memory_c.get()}};
  dnnl_stream_t stream = nullptr;
  check(api_->stream_create(&stream, bf16_->engine, dnnl_stream_default_flags),
        "creating a stream");
  const dnnl_status_t status =
      api_->primitive_execute(bf16_->product[trans_a][trans_b], stream, 3, arguments);
  api_->stream_destroy(stream);
  check(status, "a BF16 product");
}

}  // namespace te_fl::cpu
