#pragma once

#include <tessera/checkpoint/catalog.h>
#include <tessera/checkpoint/checkpoint.h>

namespace tessera::checkpoint {

/// What `save` and `load` call.
struct StateDictHooks {
  /// What is to be saved.
  static Value before_save(const StateDict& state);
  static void before_load(StateDict& state, const Catalog& catalog);
  static void on_load(StateDict& state);
};

}  // namespace tessera::checkpoint
