#pragma once

#include <tessera/mesh/device_mesh.h>
#include <tessera/placement/text.h>

#include <string_view>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

/// Reads calls of operators, as call_text (dispatch/call_text.h) writes them.
namespace tessera {

/// A call that could be made: its tensors are distributed, and have no values.
struct ReadCall {
  c10::OperatorHandle op;
  torch::jit::Stack stack;
};

/// See debug/explain.h for what is read. The mesh in the text, if there is one, must be `mesh`. Throws c10::ValueError,
/// which points at the character.
ReadCall read_call(std::string_view text, const DeviceMesh& mesh);

/// The mesh in the text; an error if it has none.
Layout mesh_of_call(std::string_view text);

}  // namespace tessera
