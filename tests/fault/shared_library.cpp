// A library that exists in several versions.
extern "C" int FAULT_SHARED_NAME() { return FAULT_SHARED_VERSION; }
