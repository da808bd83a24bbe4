#pragma once

// Marks what libte_fl.so exports; everything else is hidden.
#if defined(TE_FL_STATIC)
#define TE_FL_API
#else
#define TE_FL_API [[gnu::visibility("default")]]
#endif
