#pragma once

/// Everything of Tessera in one include.

#include <tessera/comm/backends.h>
#include <tessera/comm/collectives.h>
#include <tessera/comm/environment.h>
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

#include <torch/types.h>
