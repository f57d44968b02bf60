#pragma once

#include <tessera/export.h>
#include <tessera/rules/rule.h>

#include <string>

namespace tessera {

/// Adds or replaces the sharding rule of an operator, which may be another library's. For calls from now on,
/// on all threads; all ranks must do so alike. Throws if there is no such operator, or if it is composed of
/// others, which then have the rules.
///
///   // mine::scale_rows(Tensor x, Tensor factors) -> Tensor, sharded along the rows
///   register_sharding("mine::scale_rows", rules::explicit_strategies({{{Shard(0), Shard(0)}, {Shard(0)}}}));
TESSERA_API void register_sharding(const std::string& op, rules::Rule rule);

}  // namespace tessera
