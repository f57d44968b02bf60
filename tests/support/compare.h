#pragma once

#include <tessera/dtensor/dtensor.h>

#include <functional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/test_device.h"

/// Computations on distributed tensors against the same on one device.
namespace tessera::testing {

using Tensors = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const Tensors&)>;

/// The same values on every rank: small integers, so that sums are exact in any order.
at::Tensor numbers(at::IntArrayRef shape, int64_t seed = 0);

/// All lists of placements, one for each of `mesh_ndim` mesh dims, of a tensor of `ndim` dims.
std::vector<Placements> all_placements(int64_t mesh_ndim, int64_t ndim, bool partial);

/// Whether they have the same shape, dtype and bits.
bool same_bits(const at::Tensor& a, const at::Tensor& b);

void expect_close(const at::Tensor& actual, const at::Tensor& expected, const std::string& what);

/// `function` of inputs with these placements, and the gradients of a weighted sum of its result, against
/// plain tensors. Gradients of inputs that are not of floating type are not looked at. `orders`: the shard
/// order of each input; none: the default.
void compare(const Function& function, const Tensors& inputs, const DeviceMesh& mesh,
             const std::vector<Placements>& placements, const std::vector<ShardOrder>& orders = {});

/// Over all placements of all inputs by R, S and, if `partial`, P(sum); if these are more than `limit`, over
/// that many, drawn at random so that each placement of each input is met as often. Then over some random
/// ones with strided shards, every kind of partial values and other shard orders too.
void compare_all(const Function& function, const Tensors& inputs, at::IntArrayRef mesh_shape,
                 bool partial = true, size_t limit = 1000);

/// `function` of inputs with these placements, on a mesh of one dim and 4 ranks, does not communicate, nor do
/// its gradients if `gradients`; and its result has the placement `result`.
void expect_no_communication(const Function& function, const Tensors& inputs,
                             const std::vector<Placement>& placements, const Placement& result,
                             bool gradients = false);

}  // namespace tessera::testing
