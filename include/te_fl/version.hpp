#pragma once

#define TE_FL_VERSION_MAJOR 0
#define TE_FL_VERSION_MINOR 1
#define TE_FL_VERSION_PATCH 0
#define TE_FL_VERSION "0.1.0"
