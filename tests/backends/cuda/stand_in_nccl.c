/* This is what te-fl finds where NCCL is broken, old or good: a library of its name with the
   version NUMBER, and without its functions if HOLLOW is defined. None makes anything. */
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
