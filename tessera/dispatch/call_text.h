#pragma once

#include <tessera/placement/spec.h>

#include <string>

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

/// Calls of operators as text, for people; debug/explain.h reads it.
namespace tessera {

/// The operator and its arguments, without those that are the default. Long lists are cut short.
///   aten::mm(f32[2048,256] [S(0)], f32[256,64] [R]) on mesh(dp=2)
///   aten::sum.dim_IntList(f32[8,4] [S(0)], [1], keepdim=True) on mesh(4)
std::string call_text(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments);

/// "f32[2048,256] [S(0)]"; without the mesh.
std::string tensor_text(const Spec& spec);

/// The line of code that redistributes a tensor of that name: x = DTensor(x).redistribute({Shard(0)});
/// or what the host language says instead.
std::string redistribute_code(const std::string& name, const Placements& placements);

}  // namespace tessera
