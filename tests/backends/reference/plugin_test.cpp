#include <map>
#include <set>

#include "core/op/op_table.hpp"
#include "support/reference_ops.hpp"

namespace te_fl::testing {
namespace {

const te_fl_host_api kHost{};

TEST(ReferencePlugin, HeaderIsPureAndCallableAgain) {
  const te_fl_plugin_header* header = te_fl_reference_query(nullptr);
  ASSERT_NE(header, nullptr);
  EXPECT_EQ(te_fl_reference_query(nullptr), header);
  EXPECT_EQ(header->magic, TE_FL_PLUGIN_MAGIC);
  EXPECT_EQ(header->struct_size, sizeof(te_fl_plugin_header));
  EXPECT_EQ(header->abi_major, TE_FL_ABI_MAJOR);
  EXPECT_EQ(header->abi_minor, TE_FL_ABI_MINOR);
  EXPECT_STREQ(header->name, "reference");
  EXPECT_STREQ(header->vendor, "te-fl");
  EXPECT_EQ(header->api->devices, nullptr);
}

TEST(ReferencePlugin, InstancesAreIndependent) {
  const te_fl_plugin_api& api = *te_fl_reference_query(nullptr)->api;
  void* first = nullptr;
  void* second = nullptr;
  ASSERT_EQ(api.create(&kHost, &first, nullptr), TE_FL_OK);
  ASSERT_EQ(api.create(&kHost, &second, nullptr), TE_FL_OK);
  EXPECT_NE(first, second);
  EXPECT_EQ(api.quiesce(first, nullptr), TE_FL_OK);
  api.destroy(first);
  uint32_t count = 0;
  const te_fl_op_desc* const* list = nullptr;
  ASSERT_EQ(api.ops(second, &count, &list, nullptr), TE_FL_OK);
  EXPECT_GT(count, 0u);
  api.destroy(second);
}

TEST(ReferencePlugin, DescriptorsKeepTheRules) {
  const te_fl_plugin_api& api = *te_fl_reference_query(nullptr)->api;
  void* instance = nullptr;
  ASSERT_EQ(api.create(&kHost, &instance, nullptr), TE_FL_OK);
  uint32_t count = 0;
  const te_fl_op_desc* const* list = nullptr;
  ASSERT_EQ(api.ops(instance, &count, &list, nullptr), TE_FL_OK);
  std::set<std::string> names;
  std::map<std::string, std::string> later;
  for (uint32_t i = 0; i < count; ++i) {
    const te_fl_op_desc& op = *list[i];
    SCOPED_TRACE(op.op_name);
    EXPECT_TRUE(names.insert(op.op_name).second);
    later[op.op_name] = op.later_args != nullptr ? op.later_args : "";
    EXPECT_EQ(op.struct_size, sizeof(te_fl_op_desc));
    EXPECT_STREQ(op.impl_id, "reference.host");
    EXPECT_EQ(op.kind, static_cast<uint32_t>(TE_FL_KIND_REFERENCE));
    EXPECT_NE(op.run, nullptr);
    EXPECT_NE(op.flags & TE_FL_OP_THREAD_SAFE, 0u);
    EXPECT_EQ(op.device_types, uint64_t{1} << TE_FL_DEVICE_CPU |
                                   uint64_t{1} << TE_FL_DEVICE_CUDA_HOST |
                                   uint64_t{1} << TE_FL_DEVICE_ROCM_HOST);
  }
  for (const te_fl_op_schema* schema : core::catalogue()) {
    EXPECT_EQ(names.count(schema->name), 1u) << schema->name;
    std::string all;  // the reference backend supports every argument
    for (uint32_t i = 0; i < schema->arg_count; ++i) {
      const te_fl_arg_desc& arg = *schema->args[i];
      if ((arg.flags & TE_FL_ARG_LATER) != 0)
        all += (all.empty() ? "" : " ") + std::string(arg.name);
    }
    EXPECT_EQ(later[schema->name], all) << schema->name;
  }
  EXPECT_EQ(names.size(), core::catalogue().size());
  api.destroy(instance);
}

}  // namespace
}  // namespace te_fl::testing
