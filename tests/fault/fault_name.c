// The name of one fault plugin, separate from the code, which is compiled once for all of them.
extern const char fault_name[];
const char fault_name[] = FAULT_NAME;
