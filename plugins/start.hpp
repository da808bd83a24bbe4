#pragma once

namespace te_fl::plugins {

// Registers the built-in backends with OpRegistry::instance() and loads the plugins that discovery
// finds, once per process. Other threads that call start() meanwhile wait. The loading thread
// itself does not wait, since plugins may call ops.
void start();
// True once start() has finished on any thread.
bool started() noexcept;

// Logs environment::remarks() as warnings, each once per process. Call it after plugins have
// declared their settings.
void log_remarks();

}  // namespace te_fl::plugins
