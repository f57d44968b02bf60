#pragma once

#include <tessera/checkpoint/catalog.h>
#include <tessera/checkpoint/checkpoint.h>

namespace tessera::checkpoint {

/// What `load` calls.
struct StateDictHooks {
  static void before_load(StateDict& state, const Catalog& catalog);
  static void on_load(StateDict& state);
};

}  // namespace tessera::checkpoint
