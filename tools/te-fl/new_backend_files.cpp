#include "new_backend.hpp"

namespace te_fl_tool {
namespace {

// clang-format off
constexpr const char* kCMake = R"raw(# The @NAME@ backend of te-fl: a plugin, built against an installed te-fl (@VERSION@ or what speaks ABI @ABI@).
#   cmake -S . -B build -DCMAKE_PREFIX_PATH=<te-fl's prefix> && cmake --build build && ctest --test-dir build
cmake_minimum_required(VERSION 3.25)
project(te_fl_@NAME@ VERSION 0.1.0 LANGUAGES CXX)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
# CMAKE_PREFIX_PATH comes first; the hint is the te-fl that wrote this project.
find_package(te_fl REQUIRED HINTS "@PREFIX@")
# Unless another prefix is asked for, the plugin is installed beside te-fl, which finds it there by itself.
if(CMAKE_INSTALL_PREFIX_INITIALIZED_TO_DEFAULT)
  set(CMAKE_INSTALL_PREFIX ${te_fl_PREFIX} CACHE PATH "Where to install" FORCE)
endif()

# Hidden symbols, te_fl_plugin_query exported, a build id: what te-fl check asks of the file.
te_fl_add_plugin(te_fl_@NAME@ @SOURCES@)
target_compile_options(te_fl_@NAME@ PRIVATE -Wall -Wextra)
target_compile_definitions(te_fl_@NAME@ PRIVATE BACKEND_VERSION="${PROJECT_VERSION}")
configure_file(@NAME@.json.in @NAME@.json @ONLY)

# Below another prefix than te-fl's, TE_FL_PLUGIN_PATH names the manifest's folder.
install(TARGETS te_fl_@NAME@ LIBRARY DESTINATION ${te_fl_PLUGIN_SUBDIR}/..)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/@NAME@.json DESTINATION ${te_fl_PLUGIN_SUBDIR})

enable_testing()
find_program(TE_FL te-fl HINTS ${te_fl_DIR}/../../../bin ${te_fl_DIR}/../../../../bin REQUIRED)
add_test(NAME certified COMMAND ${TE_FL} check $<TARGET_FILE:te_fl_@NAME@> --junit check.xml --html check.html)
@TORCH_CMAKE@)raw";

constexpr const char* kManifest = R"raw({
  "file_format_version": "1.0",
  "name": "@NAME@",
  "vendor": "@NAME@",
  "library_path": "../libte_fl_@NAME@.so",
  "arch": "@CMAKE_SYSTEM_PROCESSOR@",
  "abi": "@ABI@",
  "probe": {"always": true}@LOAD_FOR@
}
)raw";

constexpr const char* kOps = R"raw(// The ops of this backend: one descriptor for each, defined beside its kernel.
#pragma once

#include "te_fl/plugin.h"

namespace @NAME@_backend {

extern const te_fl_op_desc kRelu;

}  // namespace @NAME@_backend
)raw";

constexpr const char* kRelu = R"raw(// relu: y = max(x, 0), on @MEMORY@.
#include "ops.hpp"
#include "te_fl/backend/elements.hpp"
#include "te_fl/ops/activation.h"

namespace @NAME@_backend {
namespace {

namespace b = te_fl::backend;

// What the descriptor's masks cannot say. Metadata only: it runs before every call (rule R10).
void check(const te_fl_context&, const te_fl_relu_args& args) {
  if (!b::is_contiguous(*args.input) || !b::is_contiguous(*args.output))
    b::unsupported("relu takes compact tensors only");
}

// The kernel, for each pair of element types. Input and output may be the same memory.
template <class In, class Out>
void relu(const te_fl_relu_args& args) {
  const In* x = b::data<In>(*args.input);
  Out* y = b::data<Out>(*args.output);
  const int64_t n = b::numel(*args.input);
  for (int64_t i = 0; i < n; ++i) {
    const float value = b::to_float(x[i]);
    y[i] = b::from_float<Out>(value < 0 ? 0 : value);
  }
}

void run(const te_fl_context&, const te_fl_relu_args& args) {
  b::for_element_type<float, b::bfloat16>("input", *args.input, [&](auto in) {
    b::for_element_type<float, b::bfloat16>("output", *args.output, [&](auto out) {
      relu<typename decltype(in)::type, typename decltype(out)::type>(args);
    });
  });
}

}  // namespace

const te_fl_op_desc kRelu = {
    .op_name = "relu",
    .impl_id = "vendor.@NAME@",
    .kind = TE_FL_KIND_VENDOR,
    .flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_DETERMINISTIC | TE_FL_OP_IN_PLACE_OK,
    .dtypes = b::kElementMask<float, b::bfloat16>,
    .scalings = TE_FL_BIT(TE_FL_SCALING_NONE),
    .device_types = uint64_t{1} << @DEVICE_TYPE@,
    .run = b::run_thunk<te_fl_relu_args, run>,
    .supports = b::supports_thunk<te_fl_relu_args, check>,
};

}  // namespace @NAME@_backend
)raw";

constexpr const char* kPlugin = R"raw(// What te-fl asks the plugin for. The rules (R1 ...) are at the top of te_fl/plugin.h.
@INCLUDE_DEVICE@#include "ops.hpp"
#include "te_fl/backend/plugin.hpp"

namespace {

namespace b = te_fl::backend;

// All state lives here (R8): handles of your driver, pools, compiled kernels. Where run() only enqueues, it also has
// quiesce(), which waits for whatever still runs (R15).
struct Backend : b::@INSTANCE@ {
  explicit Backend(const te_fl_host_api&) {
    ops = {@NAME@_backend::kRelu};
@DEVICES@  }
};

constexpr te_fl_plugin_header kHeader =
    b::plugin_header<Backend>("@NAME@", "@NAME@", BACKEND_VERSION);

}  // namespace

extern "C" TE_FL_PLUGIN_EXPORT const te_fl_plugin_header* te_fl_plugin_query(
    const te_fl_host_info*) {
  return &kHeader;
}
)raw";

constexpr const char* kCi = R"raw(#!/usr/bin/env bash
# Builds the backend and certifies it. TE_FL_PREFIX: where te-fl is installed, if not where the te-fl that wrote this project is.
# Leaves build/check.json, check.xml (JUnit) and check.html. Arguments go to te-fl check, such as --quick or --op relu: with
# them a part is checked, and the exit code is 4 if nothing failed, because that is no certificate.
set -euo pipefail
cd "$(dirname "$0")"
cmake -S . -B build ${TE_FL_PREFIX:+-DCMAKE_PREFIX_PATH="$TE_FL_PREFIX"}
cmake --build build --parallel
te_fl=$(sed -n 's/^TE_FL:FILEPATH=//p' build/CMakeCache.txt)
"$te_fl" check "$PWD/build/libte_fl_@NAME@.so" --json build/check.json --junit build/check.xml --html build/check.html "$@"
)raw";

constexpr const char* kReadme = R"raw(# The @NAME@ backend of te-fl

A plugin for te-fl (plugin ABI @ABI@). @WHAT@

    ./ci.sh

builds it against the te-fl that wrote the project, a prefix or a Python package (another one: TE_FL_PREFIX=/where/it/is), and runs `te-fl check` on it: the file, every case of te-fl's conformance table for every op that it registers, drawn
shapes, every row length, many threads, leaks, determinism, and the end of the plugin. build/check.html is the page to show. A
failure is printed with the command that reproduces it. `./ci.sh --quick` takes a few seconds and is no certificate (exit code 4).

| file | what |
|---|---|
@DEVICE_ROW@| src/relu.cpp | a kernel and its descriptor; copy it for the next op |
| src/ops.hpp | the list of descriptors |
| src/plugin.cpp | what te-fl asks the plugin for |
| @NAME@.json.in | the manifest by which an installed plugin is found |
@TORCH_ROWS@| ci.sh | builds and certifies |

`te-fl conformance --plugin build/libte_fl_@NAME@.so --impl vendor.@NAME@ --op relu` runs the same cases without the rest. Once you know what
you leave out, declare it in a file (`impl | op | case pattern | reason` a line) and add `--expected FILE`: any other refusal then fails.

The next op: copy src/relu.cpp, take the op's name, arguments and formula from te-fl's docs/ops.md (its struct is in
`te_fl/ops/*.h`), add the descriptor to src/ops.hpp and src/plugin.cpp and the file to CMakeLists.txt, and run ci.sh. What you do not
support yet, refuse in check() with TE_FL_UNSUPPORTED: te-fl then takes another implementation.

    TE_FL_PLUGIN_MODULES=$PWD/build/libte_fl_@NAME@.so te-fl explain relu --dtype bf16 @EXPLAIN@

`cmake --install build` puts the plugin beside te-fl, which finds it there by itself; with `--prefix P` it goes below P, and
TE_FL_PLUGIN_PATH names the folder of its manifest (P/lib/te_fl/plugins.d).
)raw";
constexpr const char* kDeviceHeader = R"raw(// The device of this backend.
#pragma once

#include "te_fl/plugin.h"

namespace @NAME@_backend {

extern const te_fl_device_desc kDevice;

}  // namespace @NAME@_backend
)raw";

constexpr const char* kDevice = R"raw(// The device: where its memory comes from and how bytes get there. This one's memory is the host's and its work
// is done at once, so that the project runs anywhere; put your driver's calls in the place of each body.
#include "device.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace @NAME@_backend {
namespace {

// A kind of memory that the device lacks is refused, and the host does without it (pinned memory, say).
te_fl_status allocate(void*, const te_fl_memory_desc* memory, void** out, const te_fl_error_sink* errors) {
  *out = nullptr;
  if (memory->kind != TE_FL_MEMORY_DEVICE) return TE_FL_UNSUPPORTED;
  const size_t alignment = memory->alignment;
  *out = std::aligned_alloc(alignment, (std::max<size_t>(memory->bytes, 1) + alignment - 1) / alignment * alignment);
  if (*out != nullptr) return TE_FL_OK;
  errors->write(errors->host, "no memory");
  return TE_FL_OUT_OF_MEMORY;
}
te_fl_status release(void*, void* data, uint32_t, void*, const te_fl_error_sink*) {
  std::free(data);
  return TE_FL_OK;
}
// Ordered on the stream; the flags say which side is host memory (bit 0: dst, bit 1: src).
te_fl_status copy(void*, void* dst, const void* src, size_t bytes, uint32_t, void*, const te_fl_error_sink*) {
  std::memmove(dst, src, bytes);
  return TE_FL_OK;
}
te_fl_status fill(void*, void* dst, uint8_t value, size_t bytes, void*, const te_fl_error_sink*) {
  std::memset(dst, value, bytes);
  return TE_FL_OK;
}
te_fl_status synchronize(void*, void*, const te_fl_error_sink*) { return TE_FL_OK; }
te_fl_status properties(void*, te_fl_device_props* props, const te_fl_error_sink*) {
  props->arch = 1;  // what you call the chip's generations, for min_arch of ops
  props->compute_units = 1;
  std::strcpy(props->name, "@NAME@");
  return TE_FL_OK;
}

// What is NULL is absent (R4): streams, events and graphs come later, each by itself.
constexpr te_fl_device_api kDeviceApi = {.struct_size = sizeof(te_fl_device_api), .allocate = allocate, .free = release,
    .copy = copy, .fill = fill, .synchronize = synchronize, .properties = properties};

}  // namespace

// A chip that DLPack has no number for is kDLExtDev of its provider: "ext:@NAME@:0" (R18).
const te_fl_device_desc kDevice = {.struct_size = sizeof(te_fl_device_desc), .device = {TE_FL_DEVICE_EXT, 0},
    .provider = "@NAME@", .self = nullptr, .api = &kDeviceApi};

}  // namespace @NAME@_backend
)raw";
// clang-format on

constexpr ProjectFile kFiles[] = {
    {"CMakeLists.txt", kCMake},
    {"@NAME@.json.in", kManifest},
    {"README.md", kReadme},
    {"ci.sh", kCi, true},
    {"src/ops.hpp", kOps},
    {"src/plugin.cpp", kPlugin},
    {"src/relu.cpp", kRelu},
    {".gitignore", "build/\n"},
    {"src/device.hpp", kDeviceHeader, false, true},
    {"src/device.cpp", kDevice, false, true},
};

constexpr Mark kHostMarks[] = {
    {"@SOURCES@", "src/plugin.cpp src/relu.cpp"},
    {"@LOAD_FOR@", ""},
    {"@MEMORY@", "host memory"},
    {"@DEVICE_TYPE@", "TE_FL_DEVICE_CPU"},
    {"@INCLUDE_DEVICE@", ""},
    {"@INSTANCE@", "Instance"},
    {"@DEVICES@", ""},
    {"@WHAT@", "It implements relu in F32 and BF16 on host memory, as a start."},
    {"@DEVICE_ROW@", ""},
    {"@EXPLAIN@", "--set TE_FL_PREFER=vendor"},
};
constexpr Mark kDeviceMarks[] = {
    {"@SOURCES@", "src/plugin.cpp src/relu.cpp src/device.cpp"},
    {"@LOAD_FOR@", ",\n  \"load_for\": [\"ext:@NAME@\"]"},
    {"@MEMORY@", "the device's memory"},
    {"@DEVICE_TYPE@", "TE_FL_DEVICE_EXT"},
    {"@INCLUDE_DEVICE@", "#include \"device.hpp\"\n"},
    {"@INSTANCE@", "DeviceInstance"},
    {"@DEVICES@",
     "    // What is here now: ask your driver, and list none if there is none.\n"
     "    devices = {&@NAME@_backend::kDevice};\n"},
    {"@WHAT@",
     "It provides the device ext:@NAME@:0 and implements relu there in F32 and BF16, as a start; "
     "what "
     "else is called on its\ntensors is run by the host on copies."},
    {"@DEVICE_ROW@", "| src/device.cpp | the device: memory, copies, properties |\n"},
    {"@EXPLAIN@", "--device ext:@NAME@:0"},
};

}  // namespace

std::span<const ProjectFile> project_files() { return kFiles; }
std::span<const Mark> project_marks(bool device) {
  if (device) return kDeviceMarks;
  return kHostMarks;
}

}  // namespace te_fl_tool
