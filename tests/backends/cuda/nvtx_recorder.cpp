// A fake profiler. NVTX loads it if NVTX_INJECTION64_PATH names it; it records the ranges that are
// pushed.
#include <nvtx3/nvToolsExt.h>

#include <cstring>
#include <deque>
#include <string>

namespace {

struct Log {
  std::deque<std::string> strings;
  std::string text;  // "[domain:message" per push, "]" per pop
};
Log& log() {
  static auto* const made = new Log;
  return *made;
}
const char* kept(const char* text) { return log().strings.emplace_back(text).c_str(); }

nvtxDomainHandle_t NVTX_API create_domain(const char* name) {
  return reinterpret_cast<nvtxDomainHandle_t>(const_cast<char*>(kept(name)));
}
nvtxStringHandle_t NVTX_API register_string(nvtxDomainHandle_t, const char* text) {
  return reinterpret_cast<nvtxStringHandle_t>(const_cast<char*>(kept(text)));
}
int NVTX_API push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  const bool registered = event->messageType == NVTX_MESSAGE_TYPE_REGISTERED;
  log().text += "[" + std::string(reinterpret_cast<const char*>(domain)) + ":" +
                (registered ? reinterpret_cast<const char*>(event->message.registered) : "?");
  return 0;
}
int NVTX_API pop(nvtxDomainHandle_t) {
  log().text += "]";
  return 0;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* nvtx_recorder_text() {
  return log().text.c_str();
}

extern "C" __attribute__((visibility("default"))) int NVTX_API
InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
  const auto* callbacks =
      static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (callbacks == nullptr ||
      callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0) {
    return 0;
  }
  const auto set = [&](unsigned id, auto function) {
    if (id < size) *table[id] = reinterpret_cast<NvtxFunctionPointer>(function);
  };
  set(NVTX_CBID_CORE2_DomainCreateA, &create_domain);
  set(NVTX_CBID_CORE2_DomainRegisterStringA, &register_string);
  set(NVTX_CBID_CORE2_DomainRangePushEx, &push);
  set(NVTX_CBID_CORE2_DomainRangePop, &pop);
  return 1;
}
