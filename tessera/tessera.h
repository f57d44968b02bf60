#pragma once

/// Everything of Tessera in one include.

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/inspect.h>
#include <tessera/checkpoint/planner_helpers.h>
#include <tessera/comm/backends.h>
#include <tessera/comm/collectives.h>
#include <tessera/comm/environment.h>
#include <tessera/comm/rpc.h>
#include <tessera/comm/run.h>
#include <tessera/comm/world.h>
#include <tessera/debug/comm_debug_mode.h>
#include <tessera/dispatch/cache.h>
#include <tessera/dispatch/guards.h>
#include <tessera/dispatch/register.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/nn/distribute_module.h>
#include <tessera/nn/hooks.h>
#include <tessera/nn/input_reshard.h>
#include <tessera/nn/members.h>
#include <tessera/nn/replicate.h>
#include <tessera/nn/style.h>
#include <tessera/placement/chunk.h>
#include <tessera/placement/layout.h>
#include <tessera/placement/placement.h>
#include <tessera/placement/spec.h>
#include <tessera/placement/text.h>
#include <tessera/random/generator.h>
#include <tessera/random/random.h>
#include <tessera/redistribute/execute.h>
#include <tessera/redistribute/plan.h>
#include <tessera/redistribute/plan_cache.h>
#include <tessera/sharded/bridge.h>
#include <tessera/sharded/init.h>
#include <tessera/sharded/log.h>
#include <tessera/sharded/module.h>
#include <tessera/sharded/ops.h>
#include <tessera/sharded/optimizer.h>
#include <tessera/sharded/registry.h>
#include <tessera/sharded/shard_tensor.h>
#include <tessera/sharded/sharded_tensor.h>
#include <tessera/sharded/state.h>
#include <tessera/sharded/validate.h>

#include <torch/types.h>
