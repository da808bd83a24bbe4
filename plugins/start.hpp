#pragma once

namespace te_fl::plugins {

// Registers the built-in backends with OpRegistry::instance() and loads what discovery finds, once
// in a process. Threads that call it meanwhile wait, but for the one that loads: what it loads may
// call ops.
void start();
// True once start() has come to its end, on whatever thread.
bool started() noexcept;

// Writes environment::remarks() as warnings, each once in a process. For when plugins have had
// their chance to declare settings.
void log_remarks();

}  // namespace te_fl::plugins
