// The part of XLA's FFI that te-fl's handlers use: struct layouts and constants of its C ABI,
// version 0.3 and later 0.x (JAX 0.10 introduced 0.3). They are declared here so that building
// te-fl needs no jaxlib; tests/python/jax_abi_test.py compares them with the headers of the
// installed jaxlib.
#pragma once

#include <cstddef>
#include <cstdint>

namespace te_fl::xla {

inline constexpr int kMajor = 0;
inline constexpr int kLeastMinor = 3;

struct Api;
struct Error;    // made and owned by XLA
struct Context;  // belongs to one execution

// The head of a linked list of extensions. XLA adds a Metadata request to the call that queries the
// handler's properties.
struct Extension {
  size_t struct_size;
  int32_t type;
  Extension* next;
};
inline constexpr int32_t kMetadataExtension = 1;

struct ApiVersion {
  size_t struct_size;
  Extension* extension;
  int32_t major;
  int32_t minor;
};

enum class ErrorCode : int32_t {
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kAlreadyExists = 6,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
  kDataLoss = 15,
};

struct ErrorRequest {
  size_t struct_size;
  Extension* extension;
  const char* message;  // XLA copies the text
  ErrorCode code;
};
struct StreamRequest {
  size_t struct_size;
  Extension* extension;
  Context* context;
  void* stream;  // output: a CUstream on CUDA
};
struct OrdinalRequest {
  size_t struct_size;
  Extension* extension;
  Context* context;
  int32_t ordinal;  // output
};

// XLA's function table. Members that te-fl does not call are untyped pointers.
struct Api {
  size_t struct_size;
  Extension* extension;
  ApiVersion version;
  const void* internal;
  Error* (*create_error)(ErrorRequest*);
  void* between1[3];  // error text, error end, registration
  Error* (*get_stream)(StreamRequest*);
  void* between2[12];  // types, contexts, states, memory, thread pool, futures, run id
  Error* (*get_ordinal)(OrdinalRequest*);
};

enum class ElementType : int32_t {
  kPred = 1,
  kS8 = 2,
  kS16 = 3,
  kS32 = 4,
  kS64 = 5,
  kU8 = 6,
  kU16 = 7,
  kU32 = 8,
  kU64 = 9,
  kF16 = 10,
  kF32 = 11,
  kF64 = 12,
  kBF16 = 16,
  kF8E5M2 = 19,
  kF8E4M3FN = 20,
  kF8E8M0FNU = 33,
};

struct Buffer {
  size_t struct_size;
  Extension* extension;
  ElementType type;
  void* data;
  int64_t rank;
  int64_t* extents;
};

inline constexpr int32_t kBufferArgument = 1;
inline constexpr int32_t kStringAttribute = 4;

// The operand buffers or the result buffers of one call.
struct Buffers {
  size_t struct_size;
  Extension* extension;
  int64_t count;
  int32_t* types;
  void** buffers;
};

struct Bytes {
  const char* data;
  size_t size;
};

// Sorted by name.
struct Attributes {
  size_t struct_size;
  Extension* extension;
  int64_t count;
  int32_t* types;
  Bytes** names;
  void** values;
};

struct CallFrame {
  size_t struct_size;
  Extension* extension;
  const Api* api;
  Context* context;
  int32_t stage;
  Buffers operands;
  Buffers results;
  Attributes attributes;
};

struct Metadata {
  size_t struct_size;
  ApiVersion version;
  uint32_t traits;  // 0: XLA never records the call into a command buffer
};
struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

static_assert(sizeof(Extension) == 24 && sizeof(ApiVersion) == 24 && sizeof(ErrorRequest) == 32);
static_assert(sizeof(StreamRequest) == 32 && offsetof(OrdinalRequest, ordinal) == 24);
static_assert(offsetof(Api, create_error) == 48 && offsetof(Api, get_stream) == 80 &&
              offsetof(Api, get_ordinal) == 184);
static_assert(sizeof(Buffer) == 48 && sizeof(Buffers) == 40 && sizeof(Attributes) == 48);
static_assert(offsetof(CallFrame, operands) == 40 && offsetof(CallFrame, attributes) == 120);
static_assert(offsetof(Metadata, traits) == 32 && offsetof(MetadataExtension, metadata) == 24);

}  // namespace te_fl::xla
