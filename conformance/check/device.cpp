// te-fl check: tests of a device without any op: memory, copies, fill, streams and events.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <utility>

#include "conformance/check/steps.hpp"

namespace te_fl_tool::check {
namespace {

using te_fl::Device;
using te_fl::Status;
namespace devices = te_fl::devices;
using Bytes = std::vector<uint8_t>;

constexpr size_t kAlignment = 256;  // alignment guaranteed by allocate()
constexpr size_t kLarge = size_t{16} << 20;

Status wrong(const std::string& text) { return Status(te_fl::StatusCode::kInternal, text); }

// Owns memory of a device, or pinned host memory.
class Memory {
 public:
  static te_fl::Result<Memory> make(const Device& device, size_t bytes, void* stream = nullptr) {
    TE_FL_ASSIGN_OR_RETURN(void* data, devices::allocate(device, bytes, stream));
    return Memory(device, data, stream, false);
  }
  static te_fl::Result<Memory> pinned(const Device& device, size_t bytes) {
    TE_FL_ASSIGN_OR_RETURN(void* data, devices::allocate_pinned(device, bytes));
    return Memory(device, data, nullptr, true);
  }
  Memory(Memory&& other) noexcept
      : device_(other.device_),
        data_(std::exchange(other.data_, nullptr)),
        stream_(other.stream_),
        pinned_(other.pinned_) {}
  Memory& operator=(Memory&&) = delete;
  ~Memory() { release(); }
  void release() {
    if (pinned_)
      devices::free_pinned(device_, data_);
    else
      devices::free(device_, data_, stream_);
    data_ = nullptr;
  }
  uint8_t* data() const { return static_cast<uint8_t*>(data_); }

 private:
  Memory(const Device& device, void* data, void* stream, bool is_pinned)
      : device_(device), data_(data), stream_(stream), pinned_(is_pinned) {}
  Device device_;
  void *data_, *stream_;
  bool pinned_;
};

// Test bytes. Neighbouring bytes differ, and so do bytes 256 and 4096 apart.
Bytes pattern(size_t n, unsigned seed) {
  Bytes bytes(n);
  for (size_t i = 0; i < n; ++i)
    bytes[i] = static_cast<uint8_t>(i * 151 + i / 256 * 7 + i / 4096 * 13 + seed * 29 + 1);
  return bytes;
}

// Describes the first byte that differs and the number of differences; empty if there are none.
std::string difference(const uint8_t* got, const Bytes& want) {
  size_t first = want.size(), count = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (got[i] == want[i]) continue;
    if (count++ == 0) first = i;
  }
  if (count == 0) return {};
  char text[120];
  std::snprintf(text, sizeof text,
                "byte %zu is 0x%02x, expected 0x%02x; %zu of %zu bytes are wrong", first,
                got[first], want[first], count, want.size());
  return text;
}

Status up(const Device& d, void* to, const Bytes& from, void* stream = nullptr) {
  TE_FL_RETURN_IF_ERROR(devices::copy(d, to, Device(), from.data(), from.size(), stream));
  return devices::synchronize(d, stream);
}
te_fl::Result<Bytes> down(const Device& d, const void* from, size_t n, void* stream = nullptr) {
  Bytes bytes(n, 0xee);
  TE_FL_RETURN_IF_ERROR(devices::copy(Device(), bytes.data(), d, from, n, stream));
  TE_FL_RETURN_IF_ERROR(devices::synchronize(d, stream));
  return bytes;
}

// A new stream if the device supports streams; otherwise the default stream.
te_fl::Result<te_fl::Stream> some_stream(const Device& d) {
  auto made = te_fl::Stream::create(d);
  if (!made.ok() && made.status().code() == te_fl::StatusCode::kUnsupported) return te_fl::Stream();
  return made;
}

// ---- tests of memory

// Allocates blocks of many sizes at the same time, and checks their alignment and that they do not
// overlap.
Status blocks_on(const Device& d, void* stream) {
  const size_t sizes[] = {1,    2,     255,   256,           257, 1000,
                          4095, 4096,  65537, 100,           31,  size_t{1} << 20,
                          33,   12345, 1,     kLarge / 4 + 5};
  std::vector<std::pair<Memory, size_t>> blocks;
  for (const size_t bytes : sizes) {
    TE_FL_ASSIGN_OR_RETURN(Memory block, Memory::make(d, bytes, stream));
    const auto below = reinterpret_cast<uintptr_t>(block.data()) % kAlignment;
    if (below != 0) {
      return wrong("allocate() of " + std::to_string(bytes) + " bytes gave an address that is " +
                   std::to_string(below) +
                   " bytes behind a multiple of 256; kernels and te-fl rely on "
                   "256-byte alignment");
    }
    beat();
    blocks.emplace_back(std::move(block), bytes);
  }
  for (size_t i = 0; i < blocks.size(); ++i)
    TE_FL_RETURN_IF_ERROR(
        up(d, blocks[i].first.data(), pattern(blocks[i].second, static_cast<unsigned>(i)), stream));
  for (size_t i = 0; i < blocks.size(); ++i) {
    TE_FL_ASSIGN_OR_RETURN(const Bytes got,
                           down(d, blocks[i].first.data(), blocks[i].second, stream));
    const std::string differs =
        difference(got.data(), pattern(got.size(), static_cast<unsigned>(i)));
    if (!differs.empty())
      return wrong(
          "a block of " + std::to_string(got.size()) +
          " bytes does not keep what was copied there while others are written: " + differs);
    beat();
  }
  return {};
}

Status allocation(const Device& d) {
  TE_FL_ASSIGN_OR_RETURN(const te_fl::Stream own, some_stream(d));
  for (int life = 0; life < 2; ++life) {  // the second time possibly from a cache of freed blocks
    TE_FL_RETURN_IF_ERROR(blocks_on(d, nullptr));
    TE_FL_RETURN_IF_ERROR(blocks_on(d, own.get()));
  }
  return {};
}

// The range [at, at + n) that an operation must change; all other bytes must stay.
struct Part {
  size_t at, n;
};
constexpr Part kParts[] = {{0, 1},     {1, 1},     {0, 4096},    {3, 1021},    {255, 2},
                           {256, 256}, {257, 511}, {4095, 4097}, {1, 100'000}, {0, (1 << 20) + 7}};
constexpr size_t kWhole = (1 << 20) + 512;

std::string describe_part(const Part& part) {
  return std::to_string(part.n) + " bytes at offset " + std::to_string(part.at);
}

Status fill(const Device& d) {
  TE_FL_ASSIGN_OR_RETURN(const Memory memory, Memory::make(d, kWhole));
  const Bytes before = pattern(kWhole, 1);
  for (const uint8_t value : {uint8_t{0}, uint8_t{0xa5}, uint8_t{0xff}}) {
    for (const Part& part : kParts) {
      TE_FL_RETURN_IF_ERROR(up(d, memory.data(), before));
      TE_FL_RETURN_IF_ERROR(devices::fill(d, memory.data() + part.at, value, part.n));
      Bytes want = before;
      std::fill_n(want.begin() + static_cast<std::ptrdiff_t>(part.at), part.n, value);
      TE_FL_ASSIGN_OR_RETURN(const Bytes got, down(d, memory.data(), kWhole));
      if (const std::string differs = difference(got.data(), want); !differs.empty())
        return wrong("fill() of " + describe_part(part) + " with " + std::to_string(value) +
                     " left other memory: " + differs);
      beat();
    }
  }
  return {};
}

// ---- tests of copies

Status copies_up(const Device& d, uint8_t* host) {
  TE_FL_ASSIGN_OR_RETURN(const Memory memory, Memory::make(d, kWhole));
  const Bytes before = pattern(kWhole, 2), source = pattern(kWhole, 3);
  for (const Part& part : kParts) {
    for (const size_t from : {size_t{0}, size_t{5}}) {
      TE_FL_RETURN_IF_ERROR(up(d, memory.data(), before));
      std::copy(source.begin(), source.end(), host);
      TE_FL_RETURN_IF_ERROR(
          devices::copy(d, memory.data() + part.at, Device(), host + from, part.n));
      TE_FL_RETURN_IF_ERROR(devices::synchronize(d));
      Bytes want = before;
      std::copy_n(source.begin() + static_cast<std::ptrdiff_t>(from), part.n,
                  want.begin() + static_cast<std::ptrdiff_t>(part.at));
      TE_FL_ASSIGN_OR_RETURN(const Bytes got, down(d, memory.data(), kWhole));
      if (const std::string differs = difference(got.data(), want); !differs.empty())
        return wrong("a copy from the host of " + describe_part(part) + ": " + differs);
      beat();
    }
  }
  return {};
}

Status copies_down(const Device& d, uint8_t* host) {
  TE_FL_ASSIGN_OR_RETURN(const Memory memory, Memory::make(d, kWhole));
  const Bytes source = pattern(kWhole, 4), before = pattern(kWhole, 5);
  TE_FL_RETURN_IF_ERROR(up(d, memory.data(), source));
  for (const Part& part : kParts) {
    for (const size_t to : {size_t{0}, size_t{5}}) {
      std::copy(before.begin(), before.end(), host);
      TE_FL_RETURN_IF_ERROR(devices::copy(Device(), host + to, d, memory.data() + part.at, part.n));
      TE_FL_RETURN_IF_ERROR(devices::synchronize(d));
      Bytes want = before;
      std::copy_n(source.begin() + static_cast<std::ptrdiff_t>(part.at), part.n,
                  want.begin() + static_cast<std::ptrdiff_t>(to));
      if (const std::string differs = difference(host, want); !differs.empty())
        return wrong("a copy to the host of " + describe_part(part) + ": " + differs);
      beat();
    }
  }
  return {};
}

Status copies_within(const Device& d) {
  TE_FL_ASSIGN_OR_RETURN(const Memory from, Memory::make(d, kWhole));
  TE_FL_ASSIGN_OR_RETURN(const Memory to, Memory::make(d, kWhole));
  const Bytes source = pattern(kWhole, 6), before = pattern(kWhole, 7);
  TE_FL_RETURN_IF_ERROR(up(d, from.data(), source));
  for (const Part& part : kParts) {
    for (const size_t at : {size_t{0}, size_t{5}, size_t{256}}) {
      TE_FL_RETURN_IF_ERROR(up(d, to.data(), before));
      TE_FL_RETURN_IF_ERROR(devices::copy(d, to.data() + at, d, from.data() + part.at, part.n));
      Bytes want = before;
      std::copy_n(source.begin() + static_cast<std::ptrdiff_t>(part.at), part.n,
                  want.begin() + static_cast<std::ptrdiff_t>(at));
      TE_FL_ASSIGN_OR_RETURN(const Bytes got, down(d, to.data(), kWhole));
      if (const std::string differs = difference(got.data(), want); !differs.empty())
        return wrong("a copy within the device of " + describe_part(part) + " to offset " +
                     std::to_string(at) + ": " + differs);
      beat();
    }
  }
  return {};
}

Status with_pageable(const Device& d, Status (*copies)(const Device&, uint8_t*)) {
  Bytes host(kWhole);
  return copies(d, host.data());
}

Status pinned(const Device& d) {
  const auto host = Memory::pinned(d, kWhole);
  if (!host.ok() && host.status().code() == te_fl::StatusCode::kUnsupported)
    return Status(te_fl::StatusCode::kUnsupported,
                  "the device gives no pinned memory (TE_FL_MEMORY_PINNED)");
  TE_FL_RETURN_IF_ERROR(host.status());
  TE_FL_RETURN_IF_ERROR(copies_up(d, host->data()));
  return copies_down(d, host->data());
}

// ---- tests of the order of work

// Work that occupies a device for some milliseconds, so that a missing wait is detected. Each test
// first runs without load, which already detects a device that executes late.
class Load {
 public:
  Load() = default;  // no load
  static te_fl::Result<Load> make(const Device& d, void* stream) {
    TE_FL_ASSIGN_OR_RETURN(Memory memory, Memory::make(d, kLarge, stream));
    Load load;
    load.memory_ = std::make_unique<Memory>(std::move(memory));
    for (load.fills_ = 8; load.fills_ < 512; load.fills_ *= 2) {
      const auto start = std::chrono::steady_clock::now();
      TE_FL_RETURN_IF_ERROR(load.enqueue(d, stream));
      TE_FL_RETURN_IF_ERROR(devices::synchronize(d, stream));
      beat();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      if (took.count() > 0.01) break;
    }
    return load;
  }
  Status enqueue(const Device& d, void* stream) const {
    for (int i = 0; i < fills_; ++i)
      TE_FL_RETURN_IF_ERROR(
          devices::fill(d, memory_->data(), static_cast<uint8_t>(i), kLarge, stream));
    return {};
  }

 private:
  std::unique_ptr<Memory> memory_;
  int fills_ = 0;
};

// Returns host memory for copies on a stream that may complete late: pinned if the device has
// pinned memory. The memory is kept until the child ends, since a faulty device may write to it
// after the test.
te_fl::Result<uint8_t*> landing(const Device& d, size_t bytes) {
  static auto* const pinned_ones = new std::deque<Memory>;
  static auto* const plain_ones = new std::deque<Bytes>;
  auto memory = Memory::pinned(d, bytes);
  if (!memory.ok() && memory.status().code() != te_fl::StatusCode::kUnsupported)
    return memory.status();
  uint8_t* const data = memory.ok() ? pinned_ones->emplace_back(std::move(*memory)).data()
                                    : plain_ones->emplace_back(bytes).data();
  std::memset(data, 0, bytes);
  return data;
}

constexpr size_t kSmall = 4096;

Status expect_all(const uint8_t* got, uint8_t value, const std::string& otherwise) {
  const std::string differs = difference(got, Bytes(kSmall, value));
  return differs.empty() ? Status() : wrong(otherwise + ": " + differs);
}

// Work on one stream is executed in order, and synchronize() waits for it.
Status in_order(const Device& d, void* stream, const Load& load) {
  TE_FL_ASSIGN_OR_RETURN(const Memory x, Memory::make(d, kSmall, stream));
  TE_FL_ASSIGN_OR_RETURN(const Memory y, Memory::make(d, kSmall, stream));
  TE_FL_ASSIGN_OR_RETURN(uint8_t* const at, landing(d, 2 * kSmall));
  TE_FL_RETURN_IF_ERROR(load.enqueue(d, stream));
  TE_FL_RETURN_IF_ERROR(devices::fill(d, x.data(), 11, kSmall, stream));
  TE_FL_RETURN_IF_ERROR(devices::copy(d, y.data(), d, x.data(), kSmall, stream));
  TE_FL_RETURN_IF_ERROR(devices::fill(d, x.data(), 22, kSmall, stream));
  TE_FL_RETURN_IF_ERROR(devices::copy(Device(), at, d, y.data(), kSmall, stream));
  TE_FL_RETURN_IF_ERROR(devices::copy(Device(), at + kSmall, d, x.data(), kSmall, stream));
  TE_FL_RETURN_IF_ERROR(devices::synchronize(d, stream));
  beat();
  TE_FL_RETURN_IF_ERROR(expect_all(at, 11,
                                   "fill, copy, fill on one stream: the copy's result, after "
                                   "synchronize(), is not that of the first fill"));
  return expect_all(
      at + kSmall, 22,
      "fill, copy, fill on one stream: after synchronize() the second fill is missing");
}

// Memory that is freed on a stream stays usable for work enqueued on that stream before.
Status freed_in_order(const Device& d, void* stream, const Load& load) {
  TE_FL_ASSIGN_OR_RETURN(uint8_t* const at, landing(d, kSmall));
  TE_FL_ASSIGN_OR_RETURN(Memory old, Memory::make(d, kSmall, stream));
  TE_FL_RETURN_IF_ERROR(devices::fill(d, old.data(), 33, kSmall, stream));
  TE_FL_RETURN_IF_ERROR(devices::synchronize(d, stream));
  TE_FL_RETURN_IF_ERROR(load.enqueue(d, stream));
  TE_FL_RETURN_IF_ERROR(devices::copy(Device(), at, d, old.data(), kSmall, stream));
  old.release();
  TE_FL_ASSIGN_OR_RETURN(const Memory next, Memory::make(d, kSmall, stream));
  TE_FL_RETURN_IF_ERROR(devices::fill(d, next.data(), 44, kSmall, stream));
  TE_FL_RETURN_IF_ERROR(devices::synchronize(d, stream));
  beat();
  return expect_all(at, 33,
                    "memory that was freed on its stream was taken from a copy that was enqueued "
                    "there before");
}

// A pageable source must have been read when copy() returns.
Status source_is_free(const Device& d, void* stream, const Load& load) {
  TE_FL_ASSIGN_OR_RETURN(const Memory x, Memory::make(d, kSmall, stream));
  static auto* const sources = new std::deque<Bytes>;  // kept, as in landing()
  Bytes& source = sources->emplace_back(kSmall, uint8_t{55});
  TE_FL_RETURN_IF_ERROR(load.enqueue(d, stream));
  TE_FL_RETURN_IF_ERROR(devices::copy(d, x.data(), Device(), source.data(), kSmall, stream));
  std::fill(source.begin(), source.end(), uint8_t{66});
  TE_FL_ASSIGN_OR_RETURN(const Bytes got, down(d, x.data(), kSmall, stream));
  beat();
  return expect_all(got.data(), 55,
                    "a copy read its source in pageable host memory after copy() had returned");
}

Status order_on(const Device& d, void* stream) {
  Load load;
  for (const bool loaded : {false, true}) {
    if (loaded) {
      TE_FL_ASSIGN_OR_RETURN(load, Load::make(d, stream));
    }
    TE_FL_RETURN_IF_ERROR(in_order(d, stream, load));
    TE_FL_RETURN_IF_ERROR(freed_in_order(d, stream, load));
    TE_FL_RETURN_IF_ERROR(source_is_free(d, stream, load));
  }
  return {};
}

Status default_stream(const Device& d) { return order_on(d, nullptr); }

Status streams(const Device& d) {
  TE_FL_ASSIGN_OR_RETURN(const te_fl::Stream a, te_fl::Stream::create(d));
  TE_FL_ASSIGN_OR_RETURN(const te_fl::Stream b, te_fl::Stream::create(d));
  if (a.get() == b.get()) return wrong("create_stream() returned the same stream twice");
  TE_FL_RETURN_IF_ERROR(order_on(d, a.get()));
  return order_on(d, b.get());
}

// ---- tests of events

// After stream b has waited for an event of stream a, a copy on b sees the data that stream a wrote
// before the event. The second iteration records the event again.
Status stream_waits_under(const Device& d, const te_fl::Stream& a, const Load& load) {
  TE_FL_ASSIGN_OR_RETURN(const te_fl::Stream b, te_fl::Stream::create(d));
  TE_FL_ASSIGN_OR_RETURN(te_fl::Event event, te_fl::Event::create(d));
  TE_FL_ASSIGN_OR_RETURN(const Memory x, Memory::make(d, kSmall, a.get()));
  TE_FL_ASSIGN_OR_RETURN(uint8_t* const at, landing(d, kSmall));
  for (const uint8_t value : {uint8_t{77}, uint8_t{88}}) {
    TE_FL_RETURN_IF_ERROR(load.enqueue(d, a.get()));
    TE_FL_RETURN_IF_ERROR(devices::fill(d, x.data(), value, kSmall, a.get()));
    TE_FL_RETURN_IF_ERROR(event.record(a.get()));
    TE_FL_RETURN_IF_ERROR(b.wait(event));
    TE_FL_RETURN_IF_ERROR(devices::copy(Device(), at, d, x.data(), kSmall, b.get()));
    TE_FL_RETURN_IF_ERROR(b.synchronize());
    beat();
    const Status waited =
        expect_all(at, value,
                   "wait_event() did not make the stream wait: it copied before what another "
                   "stream had enqueued before the event");
    TE_FL_RETURN_IF_ERROR(a.synchronize());
    TE_FL_RETURN_IF_ERROR(waited);
  }
  return {};
}

Status host_waits_under(const Device& d, const te_fl::Stream& a, const Load& load) {
  TE_FL_ASSIGN_OR_RETURN(te_fl::Event event, te_fl::Event::create(d));
  TE_FL_ASSIGN_OR_RETURN(const Memory x, Memory::make(d, kSmall, a.get()));
  TE_FL_ASSIGN_OR_RETURN(uint8_t* const at, landing(d, kSmall));
  for (const uint8_t value : {uint8_t{91}, uint8_t{92}}) {
    TE_FL_RETURN_IF_ERROR(load.enqueue(d, a.get()));
    TE_FL_RETURN_IF_ERROR(devices::fill(d, x.data(), value, kSmall, a.get()));
    TE_FL_RETURN_IF_ERROR(devices::copy(Device(), at, d, x.data(), kSmall, a.get()));
    TE_FL_RETURN_IF_ERROR(event.record(a.get()));
    TE_FL_RETURN_IF_ERROR(event.synchronize());
    beat();
    const Status waited = expect_all(at, value,
                                     "synchronize_event() returned before the work that the event "
                                     "marks was done");
    TE_FL_RETURN_IF_ERROR(a.synchronize());
    TE_FL_RETURN_IF_ERROR(waited);
  }
  return {};
}

// If an event is reported as done, all earlier work is complete. The event is eventually reported
// as done even if no thread waits for it.
Status polled_under(const Device& d, const te_fl::Stream& a, const Load& load) {
  TE_FL_ASSIGN_OR_RETURN(te_fl::Event event, te_fl::Event::create(d));
  TE_FL_ASSIGN_OR_RETURN(const Memory x, Memory::make(d, kSmall, a.get()));
  TE_FL_ASSIGN_OR_RETURN(uint8_t* const at, landing(d, kSmall));
  TE_FL_ASSIGN_OR_RETURN(const bool unused, event.done());
  if (!unused) return wrong("query_event() reports an event without work as not done");
  for (const uint8_t value : {uint8_t{93}, uint8_t{94}}) {
    TE_FL_RETURN_IF_ERROR(load.enqueue(d, a.get()));
    TE_FL_RETURN_IF_ERROR(devices::fill(d, x.data(), value, kSmall, a.get()));
    TE_FL_RETURN_IF_ERROR(devices::copy(Device(), at, d, x.data(), kSmall, a.get()));
    TE_FL_RETURN_IF_ERROR(event.record(a.get()));
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    for (bool done = false; !done; beat()) {
      TE_FL_ASSIGN_OR_RETURN(done, event.done());
      if (!done && std::chrono::steady_clock::now() > limit)
        return wrong("query_event() still reports an event as not done after 10 s");
    }
    const Status waited = expect_all(
        at, value,
        "query_event() reported an event as done before the work that it marks had finished");
    TE_FL_RETURN_IF_ERROR(a.synchronize());
    TE_FL_RETURN_IF_ERROR(waited);
  }
  return {};
}

// The time between two events is at most the time that passed on the host around them.
Status timed_events(const Device& d) {
  TE_FL_ASSIGN_OR_RETURN(const te_fl::Stream a, te_fl::Stream::create(d));
  TE_FL_ASSIGN_OR_RETURN(te_fl::Event first, te_fl::Event::create(d, true));
  TE_FL_ASSIGN_OR_RETURN(te_fl::Event last, te_fl::Event::create(d, true));
  TE_FL_ASSIGN_OR_RETURN(const Load load, Load::make(d, a.get()));
  TE_FL_RETURN_IF_ERROR(a.synchronize());
  const auto start = std::chrono::steady_clock::now();
  TE_FL_RETURN_IF_ERROR(first.record(a.get()));
  TE_FL_RETURN_IF_ERROR(load.enqueue(d, a.get()));
  TE_FL_RETURN_IF_ERROR(last.record(a.get()));
  TE_FL_RETURN_IF_ERROR(last.synchronize());
  const auto passed = std::chrono::duration_cast<std::chrono::nanoseconds>(
                          std::chrono::steady_clock::now() - start) +
                      std::chrono::milliseconds(1);  // tolerance between two clocks
  TE_FL_ASSIGN_OR_RETURN(const uint64_t between, last.elapsed_since(first));
  if (between == 0) return wrong("elapsed_time() says that work between two events took 0 ns");
  if (between > static_cast<uint64_t>(passed.count()))
    return wrong("elapsed_time() says " + std::to_string(between) +
                 " ns for two events around which " + std::to_string(passed.count()) +
                 " ns passed on the host");
  TE_FL_ASSIGN_OR_RETURN(const uint64_t backwards, first.elapsed_since(last));
  return backwards == 0 ? Status() : wrong("elapsed_time() is not 0 where the end came first");
}

// Makes `after` wait for the work that `before` has: by an event if the device has events.
Status follow(const Device& d, const te_fl::Stream& before, const te_fl::Stream& after) {
  te_fl::Result<te_fl::Event> event = te_fl::Event::create(d);
  // The default stream has no object that could wait.
  const bool unsupported = !event.ok() && event.status().code() == te_fl::StatusCode::kUnsupported;
  if (unsupported || after.get() == nullptr) return devices::synchronize(d, before.get());
  TE_FL_RETURN_IF_ERROR(event.status());
  TE_FL_RETURN_IF_ERROR(event->record(before.get()));
  return after.wait(*event);
}

// Copies bytes to the device on one stream, within it on another, and back on the first, and fills
// what was copied. Every memory has other bytes before.
Status round_trip(const Device& d, const te_fl::Stream& a, const te_fl::Stream& b, size_t bytes,
                  uint8_t* host) {
  TE_FL_ASSIGN_OR_RETURN(const Memory x, Memory::make(d, bytes, a.get()));
  TE_FL_ASSIGN_OR_RETURN(const Memory y, Memory::make(d, bytes, b.get()));
  const Bytes source = pattern(bytes, 8);
  const auto other = static_cast<uint8_t>(~source.back());
  std::copy(source.begin(), source.end(), host);
  TE_FL_RETURN_IF_ERROR(devices::fill(d, x.data(), other, bytes, a.get()));
  TE_FL_RETURN_IF_ERROR(devices::fill(d, y.data(), other, bytes, b.get()));
  TE_FL_RETURN_IF_ERROR(devices::copy(d, x.data(), Device(), host, bytes, a.get()));
  TE_FL_RETURN_IF_ERROR(follow(d, a, b));
  TE_FL_RETURN_IF_ERROR(devices::copy(d, y.data(), d, x.data(), bytes, b.get()));
  TE_FL_RETURN_IF_ERROR(devices::synchronize(d, b.get()));
  beat();
  const auto returned = [&](const Memory& from, const Bytes& want, const char* what) -> Status {
    std::fill_n(host, bytes, static_cast<uint8_t>(~want.back()));
    TE_FL_RETURN_IF_ERROR(devices::copy(Device(), host, d, from.data(), bytes, a.get()));
    TE_FL_RETURN_IF_ERROR(devices::synchronize(d, a.get()));
    beat();
    const std::string differs = difference(host, want);
    if (differs.empty()) return {};
    return wrong(std::to_string(bytes) + " bytes, " + what + ": " + differs);
  };
  TE_FL_RETURN_IF_ERROR(returned(x, source, "copied to the device and back"));
  TE_FL_RETURN_IF_ERROR(
      returned(y, source, "copied to the device, within it on another stream, and back"));
  TE_FL_RETURN_IF_ERROR(devices::fill(d, y.data(), other, bytes, b.get()));
  TE_FL_RETURN_IF_ERROR(follow(d, b, a));
  return returned(y, Bytes(bytes, other), "filled on another stream and copied back");
}

// Sizes of each class, since a driver may have another path for each: registers, a page, a staging
// buffer, several transfers.
Status every_size(const Device& d) {
  TE_FL_ASSIGN_OR_RETURN(const te_fl::Stream own, some_stream(d));
  TE_FL_ASSIGN_OR_RETURN(const te_fl::Stream other, some_stream(d));
  const te_fl::Stream standard;
  for (const size_t bytes :
       {size_t{1}, size_t{16}, size_t{4095}, size_t{4097}, size_t{65'537}, (size_t{1} << 20) + 3,
        (size_t{8} << 20) + 5, kLarge + 9, (size_t{32} << 20) + 1}) {
    Bytes pageable(bytes);
    const auto pinned = Memory::pinned(d, bytes);
    for (uint8_t* const host : {pageable.data(), pinned.ok() ? pinned->data() : nullptr}) {
      if (host == nullptr) continue;
      const Status right = round_trip(d, own, other, bytes, host);
      // A small device need not hold the larger sizes.
      if (right.code() == te_fl::StatusCode::kOutOfMemory && bytes > (size_t{1} << 20)) return {};
      TE_FL_RETURN_IF_ERROR(right);
      TE_FL_RETURN_IF_ERROR(round_trip(d, standard, own, bytes, host));
    }
  }
  return {};
}

template <Status (*waits)(const Device&, const te_fl::Stream&, const Load&)>
Status unloaded_and_loaded(const Device& d) {
  TE_FL_ASSIGN_OR_RETURN(const te_fl::Stream a, te_fl::Stream::create(d));
  TE_FL_RETURN_IF_ERROR(waits(d, a, Load()));
  TE_FL_ASSIGN_OR_RETURN(const Load load, Load::make(d, a.get()));
  return waits(d, a, load);
}

// ---- tests of queries

template <class Slot>
bool has(const te_fl_device_api& api, Slot te_fl_device_api::*slot) {
  const auto* at = reinterpret_cast<const char*>(&(api.*slot));
  return at + sizeof(Slot) <= reinterpret_cast<const char*>(&api) + api.struct_size &&
         api.*slot != nullptr;
}

// Checks the device's queries: its properties, whether memory belongs to it, and whether a stream
// is being captured (it is not).
Status questions(const Device& d) {
  TE_FL_ASSIGN_OR_RETURN(const te_fl_device_props props, devices::properties(d));
  if (props.name[0] == '\0') return wrong("properties() left the name empty");
  if (props.total_memory != 0 && props.free_memory > props.total_memory)
    return wrong("properties(): more memory is free (" + std::to_string(props.free_memory) +
                 " bytes) than there is (" + std::to_string(props.total_memory) + ")");
  TE_FL_ASSIGN_OR_RETURN(const te_fl::Stream own, some_stream(d));
  TE_FL_ASSIGN_OR_RETURN(const Memory memory, Memory::make(d, 1000, own.get()));
  TE_FL_ASSIGN_OR_RETURN(const te_fl_device_desc* const desc, devices::find(d));
  for (void* stream : {static_cast<void*>(nullptr), own.get()}) {
    TE_FL_ASSIGN_OR_RETURN(const bool capturing, devices::is_capturing(d, stream));
    if (capturing) return wrong("is_capturing() says that a stream is captured, and none is");
    if (has(*desc->api, &te_fl_device_api::check_stream) &&
        desc->api->check_stream(desc->self, stream, nullptr) != TE_FL_OK)
      return wrong("check_stream() refuses a stream of the device");
  }
  if (has(*desc->api, &te_fl_device_api::check_pointer)) {
    for (const Part& part : {Part{0, 1000}, Part{0, 1}, Part{999, 1}, Part{3, 500}})
      if (desc->api->check_pointer(desc->self, memory.data() + part.at, part.n, nullptr) !=
          TE_FL_OK)
        return wrong("check_pointer() refuses " + describe_part(part) +
                     " of memory that allocate() gave");
  }
  return {};
}

// Repeats allocations and copies. Memory that the device caches after free() must not grow with
// each round.
Status leak(const Device& d) {
  const auto used = [&]() -> te_fl::Result<int64_t> {
    TE_FL_ASSIGN_OR_RETURN(const te_fl_device_props props, devices::properties(d));
    if (props.free_memory == 0)
      return Status(te_fl::StatusCode::kUnsupported, "properties() does not say how much is free");
    return static_cast<int64_t>(props.total_memory - props.free_memory);
  };
  constexpr int kRounds = 5, kBlocks = 32;
  int64_t least = INT64_MAX;
  TE_FL_ASSIGN_OR_RETURN(int64_t before, used());
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < kBlocks; ++i) {
      const Bytes bytes = pattern(size_t{1} << (8 + i % 10), 3);
      TE_FL_ASSIGN_OR_RETURN(const Memory block, Memory::make(d, bytes.size()));
      TE_FL_RETURN_IF_ERROR(up(d, block.data(), bytes));
      TE_FL_RETURN_IF_ERROR(down(d, block.data(), bytes.size()).status());
    }
    beat();
    TE_FL_RETURN_IF_ERROR(devices::synchronize(d));
    TE_FL_ASSIGN_OR_RETURN(const int64_t now, used());
    if (round > 0) least = std::min(least, now - before);  // the first round fills caches
    before = now;
  }
  if (least <= 0) return {};
  return wrong("the used memory grows by " + std::to_string(least) + " bytes in every " +
               std::to_string(kBlocks) +
               " blocks that are allocated, copied to and freed; free() keeps something of them");
}

}  // namespace

const std::vector<DeviceStep>& device_steps() {
  static const std::vector<DeviceStep> steps = {
      {"device/questions", questions},
      {"device/allocation", allocation},
      {"device/fill", fill},
      {"device/copy from the host", [](const Device& d) { return with_pageable(d, copies_up); }},
      {"device/copy to the host", [](const Device& d) { return with_pageable(d, copies_down); }},
      {"device/copy within", copies_within},
      {"device/pinned memory", pinned},
      {"device/leak", leak},
      {"device/default stream", default_stream, true},
      {"device/streams", streams, true},
      {"device/a stream waits for an event", unloaded_and_loaded<stream_waits_under>, true},
      {"device/the host waits for an event", unloaded_and_loaded<host_waits_under>, true},
      {"device/an event is polled", unloaded_and_loaded<polled_under>, true},
      {"device/timed events", timed_events, true},
      {"device/every size", every_size, true},
  };
  return steps;
}

}  // namespace te_fl_tool::check
