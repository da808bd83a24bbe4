#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "core/op_table.hpp"
#include "te_fl/plugin.h"

// The layout of every struct that crosses the plugin boundary, compared with the committed golden
// file: members are never moved, only appended (R3). To accept an intended change, run this test
// with UPDATE_GOLDEN=1 in the environment and review the difference.
namespace {

constexpr const char* kUpdate = "UPDATE_GOLDEN";

#define LAYOUT(type) out << #type << " size " << sizeof(type) << "\n"
#define MEMBER(type, member) out << "  " << #member << " @" << offsetof(type, member) << "\n"

std::string describe_layout() {
  std::ostringstream out;
  LAYOUT(te_fl_error_sink);
  MEMBER(te_fl_error_sink, struct_size);
  MEMBER(te_fl_error_sink, reserved);
  MEMBER(te_fl_error_sink, host);
  MEMBER(te_fl_error_sink, write);
  LAYOUT(te_fl_dtype);
  MEMBER(te_fl_dtype, code);
  MEMBER(te_fl_dtype, bits);
  MEMBER(te_fl_dtype, lanes);
  LAYOUT(te_fl_device);
  MEMBER(te_fl_device, type);
  MEMBER(te_fl_device, index);
  LAYOUT(te_fl_dltensor);
  MEMBER(te_fl_dltensor, data);
  MEMBER(te_fl_dltensor, device);
  MEMBER(te_fl_dltensor, ndim);
  MEMBER(te_fl_dltensor, dtype);
  MEMBER(te_fl_dltensor, shape);
  MEMBER(te_fl_dltensor, strides);
  MEMBER(te_fl_dltensor, byte_offset);
  LAYOUT(te_fl_quant);
  MEMBER(te_fl_quant, struct_size);
  MEMBER(te_fl_quant, scaling);
  MEMBER(te_fl_quant, flags);
  MEMBER(te_fl_quant, amax_epsilon);
  MEMBER(te_fl_quant, columnwise_data);
  MEMBER(te_fl_quant, scale_inv);
  MEMBER(te_fl_quant, columnwise_scale_inv);
  MEMBER(te_fl_quant, amax);
  MEMBER(te_fl_quant, scale);
  LAYOUT(te_fl_tensor);
  MEMBER(te_fl_tensor, struct_size);
  MEMBER(te_fl_tensor, provider);
  MEMBER(te_fl_tensor, dl);
  MEMBER(te_fl_tensor, quant);
  LAYOUT(te_fl_saved);
  MEMBER(te_fl_saved, struct_size);
  MEMBER(te_fl_saved, opaque);
  MEMBER(te_fl_saved, producer);
  MEMBER(te_fl_saved, storage);
  LAYOUT(te_fl_extension);
  MEMBER(te_fl_extension, struct_size);
  MEMBER(te_fl_extension, type);
  MEMBER(te_fl_extension, next);
  LAYOUT(te_fl_rng);
  MEMBER(te_fl_rng, seed);
  MEMBER(te_fl_rng, offset);
  MEMBER(te_fl_rng, state);
  LAYOUT(te_fl_context);
  MEMBER(te_fl_context, struct_size);
  MEMBER(te_fl_context, flags);
  MEMBER(te_fl_context, device);
  MEMBER(te_fl_context, provider);
  MEMBER(te_fl_context, reserved);
  MEMBER(te_fl_context, stream);
  MEMBER(te_fl_context, workspace);
  MEMBER(te_fl_context, workspace_bytes);
  MEMBER(te_fl_context, plan);
  MEMBER(te_fl_context, rng);
  MEMBER(te_fl_context, errors);
  MEMBER(te_fl_context, extensions);
  LAYOUT(te_fl_arg_desc);
  MEMBER(te_fl_arg_desc, struct_size);
  MEMBER(te_fl_arg_desc, type);
  MEMBER(te_fl_arg_desc, role);
  MEMBER(te_fl_arg_desc, since);
  MEMBER(te_fl_arg_desc, flags);
  MEMBER(te_fl_arg_desc, offset);
  MEMBER(te_fl_arg_desc, count_offset);
  MEMBER(te_fl_arg_desc, dtypes);
  MEMBER(te_fl_arg_desc, scalings);
  MEMBER(te_fl_arg_desc, name);
  MEMBER(te_fl_arg_desc, shape);
  MEMBER(te_fl_arg_desc, inout_if);
  MEMBER(te_fl_arg_desc, aliases);
  MEMBER(te_fl_arg_desc, same_as);
  MEMBER(te_fl_arg_desc, enum_names);
  MEMBER(te_fl_arg_desc, neutral);
  MEMBER(te_fl_arg_desc, min);
  MEMBER(te_fl_arg_desc, max);
  LAYOUT(te_fl_op_schema);
  MEMBER(te_fl_op_schema, struct_size);
  MEMBER(te_fl_op_schema, version);
  MEMBER(te_fl_op_schema, flags);
  MEMBER(te_fl_op_schema, args_size);
  MEMBER(te_fl_op_schema, args_size_v1);
  MEMBER(te_fl_op_schema, arg_count);
  MEMBER(te_fl_op_schema, args);
  MEMBER(te_fl_op_schema, name);
  MEMBER(te_fl_op_schema, summary);
  MEMBER(te_fl_op_schema, formula);
  MEMBER(te_fl_op_schema, source);
  LAYOUT(te_fl_op_desc);
  MEMBER(te_fl_op_desc, struct_size);
  MEMBER(te_fl_op_desc, param_version);
  MEMBER(te_fl_op_desc, op_name);
  MEMBER(te_fl_op_desc, impl_id);
  MEMBER(te_fl_op_desc, kind);
  MEMBER(te_fl_op_desc, priority);
  MEMBER(te_fl_op_desc, flags);
  MEMBER(te_fl_op_desc, min_arch);
  MEMBER(te_fl_op_desc, dtypes);
  MEMBER(te_fl_op_desc, scalings);
  MEMBER(te_fl_op_desc, device_types);
  MEMBER(te_fl_op_desc, self);
  MEMBER(te_fl_op_desc, run);
  MEMBER(te_fl_op_desc, supports);
  MEMBER(te_fl_op_desc, workspace);
  MEMBER(te_fl_op_desc, saved_bytes);
  MEMBER(te_fl_op_desc, prepare);
  MEMBER(te_fl_op_desc, destroy_plan);
  MEMBER(te_fl_op_desc, schema);
  MEMBER(te_fl_op_desc, vendor);
  LAYOUT(te_fl_device_props);
  MEMBER(te_fl_device_props, struct_size);
  MEMBER(te_fl_device_props, arch);
  MEMBER(te_fl_device_props, total_memory);
  MEMBER(te_fl_device_props, free_memory);
  MEMBER(te_fl_device_props, compute_units);
  MEMBER(te_fl_device_props, reserved);
  MEMBER(te_fl_device_props, copy_bandwidth);
  MEMBER(te_fl_device_props, name);
  MEMBER(te_fl_device_props, driver);
  LAYOUT(te_fl_device_api);
  MEMBER(te_fl_device_api, struct_size);
  MEMBER(te_fl_device_api, reserved);
  MEMBER(te_fl_device_api, allocate);
  MEMBER(te_fl_device_api, free);
  MEMBER(te_fl_device_api, allocate_pinned);
  MEMBER(te_fl_device_api, free_pinned);
  MEMBER(te_fl_device_api, copy);
  MEMBER(te_fl_device_api, fill);
  MEMBER(te_fl_device_api, create_stream);
  MEMBER(te_fl_device_api, destroy_stream);
  MEMBER(te_fl_device_api, synchronize);
  MEMBER(te_fl_device_api, create_event);
  MEMBER(te_fl_device_api, destroy_event);
  MEMBER(te_fl_device_api, record_event);
  MEMBER(te_fl_device_api, wait_event);
  MEMBER(te_fl_device_api, synchronize_event);
  MEMBER(te_fl_device_api, is_capturing);
  MEMBER(te_fl_device_api, properties);
  MEMBER(te_fl_device_api, begin_capture);
  MEMBER(te_fl_device_api, end_capture);
  MEMBER(te_fl_device_api, launch_graph);
  MEMBER(te_fl_device_api, destroy_graph);
  MEMBER(te_fl_device_api, check_pointer);
  MEMBER(te_fl_device_api, check_stream);
  LAYOUT(te_fl_device_desc);
  MEMBER(te_fl_device_desc, struct_size);
  MEMBER(te_fl_device_desc, reserved);
  MEMBER(te_fl_device_desc, device);
  MEMBER(te_fl_device_desc, provider);
  MEMBER(te_fl_device_desc, self);
  MEMBER(te_fl_device_desc, api);
  LAYOUT(te_fl_host_info);
  MEMBER(te_fl_host_info, struct_size);
  MEMBER(te_fl_host_info, abi_major);
  MEMBER(te_fl_host_info, abi_minor);
  MEMBER(te_fl_host_info, reserved);
  MEMBER(te_fl_host_info, version);
  LAYOUT(te_fl_host_api);
  MEMBER(te_fl_host_api, struct_size);
  MEMBER(te_fl_host_api, reserved);
  MEMBER(te_fl_host_api, host);
  MEMBER(te_fl_host_api, log);
  MEMBER(te_fl_host_api, setting);
  LAYOUT(te_fl_finding);
  MEMBER(te_fl_finding, struct_size);
  MEMBER(te_fl_finding, level);
  MEMBER(te_fl_finding, subject);
  MEMBER(te_fl_finding, state);
  MEMBER(te_fl_finding, disables);
  MEMBER(te_fl_finding, remedy);
  LAYOUT(te_fl_finding_sink);
  MEMBER(te_fl_finding_sink, struct_size);
  MEMBER(te_fl_finding_sink, reserved);
  MEMBER(te_fl_finding_sink, host);
  MEMBER(te_fl_finding_sink, write);
  LAYOUT(te_fl_plugin_api);
  MEMBER(te_fl_plugin_api, struct_size);
  MEMBER(te_fl_plugin_api, reserved);
  MEMBER(te_fl_plugin_api, create);
  MEMBER(te_fl_plugin_api, devices);
  MEMBER(te_fl_plugin_api, ops);
  MEMBER(te_fl_plugin_api, quiesce);
  MEMBER(te_fl_plugin_api, destroy);
  MEMBER(te_fl_plugin_api, diagnose);
  LAYOUT(te_fl_plugin_header);
  MEMBER(te_fl_plugin_header, magic);
  MEMBER(te_fl_plugin_header, struct_size);
  MEMBER(te_fl_plugin_header, abi_major);
  MEMBER(te_fl_plugin_header, abi_minor);
  MEMBER(te_fl_plugin_header, min_host_minor);
  MEMBER(te_fl_plugin_header, features);
  MEMBER(te_fl_plugin_header, name);
  MEMBER(te_fl_plugin_header, vendor);
  MEMBER(te_fl_plugin_header, version);
  MEMBER(te_fl_plugin_header, build_id);
  MEMBER(te_fl_plugin_header, api);
  MEMBER(te_fl_plugin_header, reserved);
  for (const te_fl_op_schema* op : te_fl::core::catalogue()) {
    out << "op " << op->name << " v" << op->version << " size " << op->args_size << " v1 "
        << op->args_size_v1 << "\n";
    for (uint32_t i = 0; i < op->arg_count; ++i) {
      const te_fl_arg_desc& a = *op->args[i];
      out << "  " << a.name << " @" << a.offset << " since " << a.since << "\n";
    }
  }
  return out.str();
}

TEST(Abi, LayoutMatchesTheGoldenFile) {
  const std::string path = std::string(TE_FL_SOURCE_DIR) + "/tests/abi/golden_offsets.txt";
  const std::string now = describe_layout();
  if (std::getenv(kUpdate) != nullptr) std::ofstream(path) << now;
  std::ifstream file(path);
  ASSERT_TRUE(file) << path;
  std::stringstream golden;
  golden << file.rdbuf();
  std::istringstream a(golden.str()), b(now);
  std::string want, got, section;
  for (int line = 1; std::getline(a, want); ++line) {
    ASSERT_TRUE(std::getline(b, got))
        << "the layout ends before golden line " << line << ": " << want;
    if (got[0] != ' ') section = got;
    ASSERT_EQ(got, want) << "golden line " << line << ", in " << section;
  }
  EXPECT_FALSE(std::getline(b, got)) << "not in the golden file: " << got;
}

TEST(Abi, DlpackLayouts) {
  // DLPack 1.1: DLDevice, DLDataType, DLTensor on a 64-bit machine.
  EXPECT_EQ(sizeof(te_fl_device), 8u);
  EXPECT_EQ(sizeof(te_fl_dtype), 4u);
  EXPECT_EQ(sizeof(te_fl_dltensor), 48u);
  EXPECT_EQ(offsetof(te_fl_dltensor, device), 8u);
  EXPECT_EQ(offsetof(te_fl_dltensor, ndim), 16u);
  EXPECT_EQ(offsetof(te_fl_dltensor, dtype), 20u);
  EXPECT_EQ(offsetof(te_fl_dltensor, shape), 24u);
  EXPECT_EQ(offsetof(te_fl_dltensor, strides), 32u);
  EXPECT_EQ(offsetof(te_fl_dltensor, byte_offset), 40u);
}

TEST(Abi, EveryStructBeginsWithItsSize) {
  EXPECT_EQ(offsetof(te_fl_tensor, struct_size), 0u);
  EXPECT_EQ(offsetof(te_fl_quant, struct_size), 0u);
  EXPECT_EQ(offsetof(te_fl_context, struct_size), 0u);
  EXPECT_EQ(offsetof(te_fl_op_desc, struct_size), 0u);
  EXPECT_EQ(offsetof(te_fl_op_schema, struct_size), 0u);
  EXPECT_EQ(offsetof(te_fl_arg_desc, struct_size), 0u);
  EXPECT_EQ(offsetof(te_fl_device_api, struct_size), 0u);
  EXPECT_EQ(offsetof(te_fl_device_desc, struct_size), 0u);
  EXPECT_EQ(offsetof(te_fl_host_api, struct_size), 0u);
  EXPECT_EQ(offsetof(te_fl_plugin_api, struct_size), 0u);
  EXPECT_EQ(offsetof(te_fl_saved, struct_size), 0u);
  // The query's header leads with the magic, so that a reader can tell garbage before it trusts a
  // size.
  EXPECT_EQ(offsetof(te_fl_plugin_header, magic), 0u);
  EXPECT_EQ(offsetof(te_fl_plugin_header, struct_size), 4u);
}

}  // namespace
