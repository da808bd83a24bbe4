#pragma once

// Marks the symbols that libte_fl.so exports. All other symbols are hidden.
#if defined(TE_FL_STATIC)
#define TE_FL_API
#else
#define TE_FL_API [[gnu::visibility("default")]]
#endif
