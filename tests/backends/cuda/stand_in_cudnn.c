/* A fake cuDNN of version NUMBER. It refuses every call that would compute. */
#include <stddef.h>

size_t cudnnGetVersion(void) { return NUMBER; }
const char* cudnnGetErrorString(int status) { return status == 0 ? "no error" : "an error"; }
void cudnnGetLastErrorString(char* text, size_t room) {
  if (room > 0) text[0] = 0;
}
int cudnnCreate(void) { return 3000; }
int cudnnDestroy(void) { return 3000; }
int cudnnSetStream(void) { return 3000; }
int cudnnBackendCreateDescriptor(void) { return 3000; }
int cudnnBackendDestroyDescriptor(void) { return 3000; }
int cudnnBackendFinalize(void) { return 3000; }
int cudnnBackendSetAttribute(void) { return 3000; }
int cudnnBackendGetAttribute(void) { return 3000; }
int cudnnBackendExecute(void) { return 3000; }
