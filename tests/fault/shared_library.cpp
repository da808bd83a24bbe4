// A shared library that is built in several versions.
extern "C" int FAULT_SHARED_NAME() { return FAULT_SHARED_VERSION; }
