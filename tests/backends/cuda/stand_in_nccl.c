/* A fake NCCL of version NUMBER: good, too old, or broken (with HOLLOW defined, it lacks NCCL's
   functions). It creates no communicator. */
int ncclGetVersion(int* number) {
  *number = NUMBER;
  return 0;
}
#ifndef HOLLOW
const char* ncclGetErrorString(int status) { return status == 0 ? "no error" : "an error"; }
int ncclGetUniqueId(void) { return 1; }
int ncclCommInitRank(void) { return 1; }
int ncclCommDestroy(void) { return 1; }
int ncclAllReduce(void) { return 1; }
int ncclReduceScatter(void) { return 1; }
int ncclAllGather(void) { return 1; }
int ncclCommAbort(void) { return 0; }
int ncclCommGetAsyncError(void) { return 1; }
int ncclGroupStart(void) { return 1; }
int ncclGroupEnd(void) { return 1; }
int ncclSend(void) { return 1; }
int ncclRecv(void) { return 1; }
int ncclBroadcast(void) { return 1; }
#endif
