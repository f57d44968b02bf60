#pragma once

#include <tessera/checkpoint/catalog.h>

#include <map>
#include <string>
#include <vector>

namespace tessera::checkpoint {

/// A leaf of a state dict: a tensor; or a value without tensors: a scalar, text, bytes, an empty dict, or a list that
/// has neither tensors nor dicts in it (as in PyTorch's own flattening).
struct StateLeaf {
  Path path;
  Value* value = nullptr;  // in the state dict
};

/// The leaves of a state dict by key. Throws if two have the same key.
std::map<std::string, StateLeaf> flatten(Value& state);

/// Puts a value where `path` says, making the dicts and lists on the way that are not there yet. Items of a list
/// must be put in the order of their indices.
void insert(Value& state, const Path& path, Value value);

}  // namespace tessera::checkpoint
