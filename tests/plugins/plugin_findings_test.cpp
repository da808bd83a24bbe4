// A plugin's findings about its environment, as `te-fl info` and `te-fl doctor` receive them.
#include <gtest/gtest.h>

#include <stdexcept>

#include "plugins/activate.hpp"
#include "support/expect.hpp"

namespace te_fl::plugins {
namespace {

te_fl_status (*g_diagnose)(void*, const te_fl_finding_sink*, const te_fl_error_sink*) = nullptr;
uint32_t g_api_size = sizeof(te_fl_plugin_api);

const te_fl_plugin_header* query_findings(const te_fl_host_info*) {
  static te_fl_plugin_api api;
  api = te_fl_plugin_api{};
  api.struct_size = g_api_size;
  api.create = [](const te_fl_host_api*, void** instance, const te_fl_error_sink*) {
    static int state;
    *instance = &state;
    return te_fl_status{TE_FL_OK};
  };
  api.destroy = [](void*) {};
  api.diagnose = g_diagnose;
  static te_fl_plugin_header header;
  header = te_fl_plugin_header{};
  header.magic = TE_FL_PLUGIN_MAGIC;
  header.struct_size = sizeof header;
  header.abi_major = TE_FL_ABI_MAJOR;
  header.abi_minor = TE_FL_ABI_MINOR;
  header.min_host_minor = 0;
  header.name = "talker";
  header.vendor = "acme";
  header.api = &api;
  return &header;
}

Result<std::vector<Finding>> findings() {
  OpRegistry registry;
  TE_FL_ASSIGN_OR_RETURN(const std::shared_ptr<Instance> instance,
                         activate(query_findings, registry));
  return instance->diagnose();
}

TEST(PluginFindings, AreCopied) {
  g_diagnose = [](void*, const te_fl_finding_sink* sink, const te_fl_error_sink*) -> te_fl_status {
    std::string state = "2.1, /opt/libacme.so";
    te_fl_finding f;
    f.subject = "libacme";
    f.state = state.c_str();
    sink->write(sink->host, &f);
    f.level = TE_FL_FINDING_NOTE;
    f.disables = "nothing much";
    f.remedy = "install libacme 3";
    sink->write(sink->host, &f);
    state = "overwritten";
    f.struct_size = offsetof(te_fl_finding, disables);  // as an older plugin reports
    f.level = 77;
    f.state = nullptr;
    sink->write(sink->host, &f);
    f.struct_size = 3;  // an invalid struct
    sink->write(sink->host, &f);
    sink->write(sink->host, nullptr);
    return TE_FL_OK;
  };
  const auto found = findings();
  ASSERT_OK(found);
  ASSERT_EQ(found->size(), 3u);
  EXPECT_EQ((*found)[0].level, Finding::Level::kOk);
  EXPECT_EQ((*found)[0].subject, "libacme");
  EXPECT_EQ((*found)[0].state, "2.1, /opt/libacme.so");
  EXPECT_EQ((*found)[0].remedy, "");
  EXPECT_EQ((*found)[1].level, Finding::Level::kNote);
  EXPECT_EQ((*found)[1].disables, "nothing much");
  EXPECT_EQ((*found)[1].remedy, "install libacme 3");
  EXPECT_EQ((*found)[2].level, Finding::Level::kProblem);
  EXPECT_EQ((*found)[2].state, "");
  EXPECT_EQ((*found)[2].disables, "");
}

TEST(PluginFindings, APluginWithoutTheEntryHasNone) {
  g_diagnose = nullptr;
  EXPECT_OK(findings());
  EXPECT_TRUE(findings()->empty());
  // The table's struct_size ends before `diagnose`, so the host must not call it.
  g_diagnose = [](void*, const te_fl_finding_sink*, const te_fl_error_sink*) -> te_fl_status {
    ADD_FAILURE() << "called beyond the table's size";
    return TE_FL_OK;
  };
  g_api_size = offsetof(te_fl_plugin_api, diagnose);
  EXPECT_TRUE(findings()->empty());
  g_api_size = sizeof(te_fl_plugin_api);
}

TEST(PluginFindings, ErrorsAndExceptionsAreStatuses) {
  g_diagnose = [](void*, const te_fl_finding_sink*,
                  const te_fl_error_sink* errors) -> te_fl_status {
    errors->write(errors->host, "the driver does not answer");
    return TE_FL_TIMEOUT;
  };
  EXPECT_EQ(findings().status().code(), StatusCode::kTimeout);
  EXPECT_EQ(findings().status().message(),
            "diagnose of plugin 'talker': the driver does not answer");
  g_diagnose = [](void*, const te_fl_finding_sink*, const te_fl_error_sink*) -> te_fl_status {
    throw std::runtime_error("oops");
  };
  EXPECT_EQ(findings().status().code(), StatusCode::kInternal);
}

}  // namespace
}  // namespace te_fl::plugins
