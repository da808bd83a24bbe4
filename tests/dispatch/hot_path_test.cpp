// A warm call allocates nothing and takes no lock: asserted by counting both where the C library is
// entered.

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>

#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "support/sanitizers.hpp"

// A sanitizer has these functions for itself.
#define TE_FL_SANITIZED (TE_FL_ASAN || TE_FL_TSAN)

namespace {

// Counts this thread's allocations while it asks for that.
constinit thread_local bool t_counting = false;
constinit thread_local int t_allocations = 0;
constinit thread_local int t_locks = 0;

}  // namespace

#if !TE_FL_SANITIZED

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

void* malloc(size_t bytes) {
  if (t_counting) ++t_allocations;
  return __libc_malloc(bytes);
}
void* calloc(size_t n, size_t bytes) {
  if (t_counting) ++t_allocations;
  return __libc_calloc(n, bytes);
}
void* realloc(void* p, size_t bytes) {
  if (t_counting) ++t_allocations;
  return __libc_realloc(p, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  if (t_counting) ++t_allocations;
  return __libc_memalign(alignment, bytes);
}

#define TE_FL_COUNT_LOCK(name, type)                           \
  int name(type* lock) {                                       \
    using Function = int (*)(type*);                           \
    static std::atomic<Function> next{nullptr};                \
    Function f = next.load(std::memory_order_relaxed);         \
    if (f == nullptr) {                                        \
      f = reinterpret_cast<Function>(dlsym(RTLD_NEXT, #name)); \
      next.store(f, std::memory_order_relaxed);                \
    }                                                          \
    if (t_counting) ++t_locks;                                 \
    return f(lock);                                            \
  }
TE_FL_COUNT_LOCK(pthread_mutex_lock, pthread_mutex_t)
TE_FL_COUNT_LOCK(pthread_mutex_trylock, pthread_mutex_t)
TE_FL_COUNT_LOCK(pthread_rwlock_rdlock, pthread_rwlock_t)
TE_FL_COUNT_LOCK(pthread_rwlock_wrlock, pthread_rwlock_t)
TE_FL_COUNT_LOCK(pthread_spin_lock, pthread_spinlock_t)
}

#endif

namespace te_fl {
namespace {

using testing::Fake;
using testing::FiveCall;

te_fl_status nothing(void*, const te_fl_context*, const void*) { return TE_FL_OK; }

struct Counts {
  int allocations;
  int locks;
};

template <class F>
Counts counted(F&& f) {
  t_allocations = t_locks = 0;
  t_counting = true;
  f();
  t_counting = false;
  return {t_allocations, t_locks};
}

class HotPath : public ::testing::Test {
 protected:
  void SetUp() override {
    if (TE_FL_SANITIZED) GTEST_SKIP() << "allocations and locks cannot be counted";
    for (Fake* f : {&portable, &vendor}) {
      f->desc.run = &nothing;
      ASSERT_OK(registry.register_op(f->desc, "tests", "acme"));
    }
    op = *registry.find("test::five");
  }
  // Calls often, after a few to warm up; expects nothing but calls.
  template <class F>
  void expect_clean(F&& call) {
    bool good = true;
    for (int i = 0; i < 3; ++i) good = good && call().ok();
    const Counts counts = counted([&] {
      for (int i = 0; i < 1000; ++i) good = call().ok() && good;
    });
    EXPECT_TRUE(good);
    EXPECT_EQ(counts.allocations, 0);
    EXPECT_EQ(counts.locks, 0);
  }

  OpRegistry registry;
  OpManager manager{registry};
  Fake portable{"default.p"}, vendor{"vendor.v"};
  FiveCall five;
  OpId op;
};

TEST_F(HotPath, TheCountersCount) {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  const Counts counts = counted([&] {
    void* volatile p = malloc(10);
    free(p);
    delete new int(1);
    pthread_mutex_lock(&mutex);
    pthread_mutex_unlock(&mutex);
  });
  EXPECT_GE(counts.allocations, 1);
  EXPECT_EQ(counts.locks, 1);
  // An error is made of strings: the counters see through the library, too.
  five.args.a = nullptr;
  EXPECT_GT(counted([&] { EXPECT_FALSE(manager.call(op, &five.args).ok()); }).allocations, 0);
}

TEST_F(HotPath, Call) {
  expect_clean([&] { return manager.call(op, &five.args); });
}

TEST_F(HotPath, PreparedHandle) {
  const auto handle = manager.prepare(op, &five.args);
  ASSERT_OK(handle);
  expect_clean([&] { return handle->call(&five.args); });
}

TEST_F(HotPath, EnteringAndLeavingScopes) {
  PolicySettings s;
  s.prefer = Kind::kVendor;
  const SelectionPolicy policy = SelectionPolicy::intern(s);
  expect_clean([&] {
    const Status outside = manager.call(op, &five.args);
    const PolicyScope scope(policy);
    const Status inside = manager.call(op, &five.args);
    return outside.ok() ? inside : outside;
  });
}

TEST_F(HotPath, GlobalPolicyChanges) {
  PolicySettings s;
  s.prefer = Kind::kVendor;
  const SelectionPolicy a = SelectionPolicy::intern(s), b = SelectionPolicy::intern({});
  int i = 0;
  expect_clean([&] {
    set_global_policy(++i % 2 == 0 ? a : b);
    return manager.call(op, &five.args);
  });
  clear_global_policy();
}

TEST_F(HotPath, SupportsWorkspaceAndPlans) {
  portable.desc.flags &= ~uint32_t{TE_FL_OP_STATIC_SUPPORT};
  portable.desc.supports = [](void*, const te_fl_context*, const void*) -> te_fl_status {
    return TE_FL_OK;
  };
  portable.desc.workspace = [](void*, const te_fl_context*, const void*,
                               size_t* bytes) -> te_fl_status {
    *bytes = 100000;
    return TE_FL_OK;
  };
  portable.desc.prepare = [](void*, const te_fl_context*, const void*,
                             void** plan) -> te_fl_status {
    *plan = nullptr;
    return TE_FL_OK;
  };
  portable.desc.destroy_plan = [](void*, void*) {};
  ASSERT_OK(registry.unregister_op("test::five", "default.p"));
  ASSERT_OK(registry.register_op(portable.desc));
  expect_clean([&] { return manager.call(op, &five.args); });
}

TEST_F(HotPath, ManyShapes) {
  std::vector<std::unique_ptr<FiveCall>> calls;
  for (int64_t n = 1; n < 50; ++n)
    calls.push_back(std::make_unique<FiveCall>(DType::kF32, std::vector<int64_t>{n, 3}));
  ASSERT_OK(manager.call(op, &calls[0]->args));
  size_t next = 0;
  expect_clean([&] { return manager.call(op, &calls[next++ % calls.size()]->args); });
}

}  // namespace
}  // namespace te_fl
