#pragma once

/// Marks what users of the library may call; everything else stays hidden inside it.
#define TESSERA_API __attribute__((visibility("default")))
