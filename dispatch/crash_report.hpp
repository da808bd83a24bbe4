#pragma once

// If a signal ends the process while a thread is inside a function of an implementation, a handler
// writes one line to stderr that names the signal, the implementation, its plugin, the op and the
// arguments. The handler then passes the signal on: it restores the action that was set before it,
// and the signal is delivered again.
namespace te_fl::dispatch {

// Follows TE_FL_CRASH_REPORT. Installs the handlers for SIGSEGV, SIGBUS, SIGILL, SIGFPE and SIGABRT
// if the setting is on and they are not installed yet, except for signals that are ignored. If the
// setting is off, installed handlers pass signals on without a report. Any thread may call it.
void follow_crash_report_setting();

}  // namespace te_fl::dispatch
