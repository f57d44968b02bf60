// Modules with sharded parameters: how they get them, train, are saved and loaded.

#include <tessera/comm/collectives.h>
#include <tessera/nn/members.h>
#include <tessera/sharded/init.h>
#include <tessera/sharded/module.h>
#include <tessera/sharded/ops.h>
#include <tessera/sharded/optimizer.h>
#include <tessera/sharded/registry.h>
#include <tessera/sharded/state.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/sharded/specs.h"
#include "tests/support/compare.h"
#include "tests/support/errors.h"

namespace tessera::sharded {
namespace {

using testing::chunks;
using testing::error_of;
using testing::expect_close;
using testing::expect_error;
using testing::global_tensor;
using testing::on_ranks;
using testing::part;

at::Tensor numbers(at::IntArrayRef shape, int64_t seed) {
  return (at::remainder(at::arange(c10::multiply_integers(shape)) * 7 + seed, 11) - 5)
             .to(at::kFloat)
             .view(shape) /
         10;
}

/// Bags of items, and a layer on their means.
struct Recommender : torch::nn::Module {
  Recommender() {
    items = register_module(
        "items", torch::nn::EmbeddingBag(torch::nn::EmbeddingBagOptions(13, 6).mode(torch::kMean)));
    users = register_module("users", torch::nn::Embedding(9, 6));
    top = register_module("top", torch::nn::Linear(6, 2));
    const torch::NoGradGuard no_grad;
    int64_t seed = 0;
    for (auto& parameter : parameters()) parameter.copy_(numbers(parameter.sizes(), seed++));
  }
  at::Tensor forward(int64_t rank) {
    const at::Tensor bags = at::remainder(at::arange(12) * (rank + 2), 13).view({3, 4});
    const at::Tensor who = at::remainder(at::arange(3) * (rank + 1) + rank, 9);
    return top->forward(torch::tanh(items->forward(bags) + users->forward(who)));
  }
  torch::nn::EmbeddingBag items{nullptr};
  torch::nn::Embedding users{nullptr};
  torch::nn::Linear top{nullptr};
};

ShardingPlan both_tables() {
  ShardingPlan plan;
  plan.plan["items.weight"] = chunks(0, {0, 1, 2, 3}).clone();
  plan.plan["users.weight"] = chunks(1, {3, 1, 2, 0}).clone();
  return plan;
}

// --- shard_parameter, shard_module

TEST(ShardParameter, ReplacesItEverywhere) {
  on_ranks(4, [](int64_t rank) {
    torch::nn::Linear linear(6, 10);
    {
      const torch::NoGradGuard no_grad;
      linear->weight.copy_(global_tensor({10, 6}) * (rank == 2 ? 1 : 0));
    }
    shard_parameter(*linear, "weight", chunks(0, {0, 1, 2, 3}), /*src_rank=*/2);
    ASSERT_TRUE(ShardedTensor::is_sharded_tensor(linear->weight));
    EXPECT_TRUE(linear->named_parameters()["weight"].is_same(linear->weight));
    EXPECT_TRUE(linear->weight.requires_grad());
    const ShardedTensor weight(linear->weight);
    EXPECT_TRUE(at::equal(weight.local_tensor().detach(),
                          part(global_tensor({10, 6}), {3 * rank, 0}, {rank < 3 ? 3 : 1, 6})));
    EXPECT_EQ(linear->parameters().size(), 2);
  });
}

/// With a member of its own.
struct TableImpl : torch::nn::Module {
  TableImpl() { table = register_parameter("table", numbers({6, 4}, 1)); }
  at::Tensor table;
};

TEST(ShardParameter, FindsMembersOfUsersModules) {
  on_ranks(2, [](int64_t) {
    TableImpl model;
    ShardingPlan plan;
    plan.plan["table"] = chunks(0, {0, 1}).clone();
    expect_error<c10::Error>([&] { shard_module(model, plan); }, {"register_members"});
    EXPECT_FALSE(ShardedTensor::is_sharded_tensor(model.table));
  });
  register_members<TableImpl>(&TableImpl::table);
  on_ranks(2, [](int64_t) {
    TableImpl model;
    ShardingPlan plan;
    plan.plan["table"] = chunks(0, {0, 1}).clone();
    shard_module(model, plan);
    EXPECT_TRUE(ShardedTensor::is_sharded_tensor(model.table));
    EXPECT_TRUE(model.named_parameters()["table"].is_same(model.table));
    EXPECT_EQ(named_params_with_sharded_tensor(model).size(), 1);
  });
}

TEST(ShardParameter, Errors) {
  on_ranks(2, [](int64_t) {
    torch::nn::Linear linear(4, 4);
    const auto spec = chunks(0, {0, 1});
    expect_error<c10::ValueError>([&] { shard_parameter(*linear, "wieght", spec); },
                                  {"wieght", "weight, bias"});
    expect_error<c10::ValueError>([&] { shard_parameter(*linear, "weight", chunks(2, {0, 1})); }, {"dim 2"});
    expect_error<c10::ValueError>([&] { shard_parameter(*linear, "weight", chunks(0, {0, 5})); }, {"rank 5"});
    torch::nn::Linear transposed(4, 4);
    {
      const torch::NoGradGuard no_grad;
      transposed->weight.set_data(transposed->weight.t());
    }
    expect_error<c10::ValueError>([&] { shard_parameter(*transposed, "weight", spec); }, {"not contiguous"});
    shard_parameter(*linear, "bias", spec);
    expect_error<c10::ValueError>([&] { shard_parameter(*linear, "bias", spec); }, {"already"});
    const at::Tensor weight = linear->weight;
    expect_error<c10::Error>([&] { shard_parameter(*linear, "weight", spec); }, {"another handle exists"});
  });
}

TEST(ShardModule, TrainsAsThePlainOne) {
  on_ranks(4, [](int64_t rank) {
    for (const bool adagrad : {false, true}) {
      // All ranks' losses, of one plain model.
      Recommender plain;
      torch::optim::SGD sgd(plain.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      torch::optim::Adagrad ada(plain.parameters(), torch::optim::AdagradOptions(0.1));
      Recommender model;
      shard_module(model, both_tables());
      EXPECT_EQ(ShardedTensor(model.users->weight).local_tensor().size(1), rank == 0 ? 0 : 2);
      ShardedOptimizer optimizer(
          named_params_with_sharded_tensor(model),
          adagrad ? ShardedOptimizer::of<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.1))
                  : ShardedOptimizer::of<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9)));
      for (int step = 0; step < 5; ++step) {
        plain.zero_grad();
        at::Tensor loss = at::zeros({});
        for (int64_t each = 0; each < 4; ++each) loss = loss + plain.forward(each).square().sum();
        loss.backward();
        adagrad ? ada.step() : sgd.step();

        optimizer.zero_grad();
        model.forward(rank).square().sum().backward();
        // The layers that are on every rank are summed as data parallel does.
        for (const at::Tensor& parameter : model.top->parameters())
          comm::all_reduce(parameter.grad(), c10d::ReduceOp::SUM, current_world()->group()).wait();
        optimizer.step();
      }
      for (const auto& [name, parameter] : named_params_with_sharded_tensor(model)) {
        const at::Tensor expected = plain.named_parameters()[name].detach();
        if (!ShardedTensor::is_sharded_tensor(parameter)) {
          expect_close(parameter.detach(), expected, name);
          continue;
        }
        for (const LocalShard& shard : ShardedTensor(parameter).local_shards())
          expect_close(shard.tensor.detach(),
                       part(expected, shard.metadata.shard_offsets, shard.metadata.shard_sizes), name);
      }
    }
  });
}

// --- libtorch's own training tools

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

std::vector<std::pair<std::string, MakeOptimizer>> optimizers() {
  using namespace torch::optim;
  return {
      {"SGD", ShardedOptimizer::of<SGD>(SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01))},
      {"Adam", ShardedOptimizer::of<Adam>(AdamOptions(0.05).weight_decay(0.01).amsgrad(true))},
      {"AdamW", ShardedOptimizer::of<AdamW>(AdamWOptions(0.05))},
      {"Adagrad", ShardedOptimizer::of<Adagrad>(AdagradOptions(0.1).weight_decay(0.01))},
      {"RMSprop", ShardedOptimizer::of<RMSprop>(RMSpropOptions(0.02).momentum(0.5).centered(true))},
  };
}

/// Several shards on a rank, and none on another.
ShardingPlan uneven_tables() {
  ShardingPlan plan;
  plan.plan["items.weight"] = chunks(0, {0, 1, 0, 2}).clone();
  plan.plan["users.weight"] = testing::grid_spec({9, 6}, 3).clone();
  return plan;
}

/// The gradients of what is on every rank are summed, as data parallel does.
void reduce_gradients(const torch::nn::Module& replicated) {
  for (const at::Tensor& parameter : replicated.parameters())
    comm::all_reduce(parameter.grad(), c10d::ReduceOp::SUM, current_world()->group()).wait();
}

void expect_same_values(const torch::nn::Module& model, const torch::nn::Module& plain,
                        const std::string& what) {
  for (const auto& [name, parameter] : named_params_with_sharded_tensor(model)) {
    const at::Tensor expected = plain.named_parameters()[name].detach();
    if (ShardedTensor::is_sharded_tensor(parameter)) {
      for (const LocalShard& shard : ShardedTensor(parameter).local_shards())
        expect_close(shard.tensor.detach(),
                     part(expected, shard.metadata.shard_offsets, shard.metadata.shard_sizes), what + name);
    } else {
      expect_close(parameter.detach(), expected, what + name);
    }
  }
}

/// Nothing below but the loss knows that the model is sharded.
TEST(ShardModule, TrainsWithLibtorchsOptimisersClippingAndZeroGrad) {
  on_ranks(4, [](int64_t rank) {
    const double inf = std::numeric_limits<double>::infinity();
    const std::vector<double> norms{2, 1, inf, 3, 2};
    for (const auto& [name, make] : optimizers()) {
      Recommender plain, model;
      shard_module(model, uneven_tables());
      const auto one = make(plain.parameters()), many = make(model.parameters());
      for (int step = 0; step < 5; ++step) {
        const bool set_to_none = step % 2 == 0;
        plain.zero_grad(set_to_none);
        at::Tensor loss = at::zeros({});
        for (int64_t each = 0; each < 4; ++each) loss = loss + plain.forward(each).square().sum();
        loss.backward();
        const double expected = torch::nn::utils::clip_grad_norm_(plain.parameters(), 0.5, norms[step]);
        one->step();

        step == 3 ? many->zero_grad(set_to_none) : model.zero_grad(set_to_none);
        model.forward(rank).square().sum().backward();
        reduce_gradients(*model.top);
        EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(model.parameters(), 0.5, norms[step]), expected,
                    1e-5 * expected)
            << name << ", norm " << norms[step];
        many->step();
      }
      expect_same_values(model, plain, name + " ");
    }
  });
}

TEST(ShardModule, GradientsCanBeClippedByValue) {
  on_ranks(4, [](int64_t rank) {
    Recommender plain, model;
    shard_module(model, uneven_tables());
    at::Tensor loss = at::zeros({});
    for (int64_t each = 0; each < 4; ++each) loss = loss + plain.forward(each).square().sum();
    loss.backward();
    model.forward(rank).square().sum().backward();
    torch::nn::utils::clip_grad_value_(plain.parameters(), 0.05);
    torch::nn::utils::clip_grad_value_(model.parameters(), 0.05);
    const ShardedTensor items(model.items->weight);
    for (const LocalShard& shard : items.local_shards())
      expect_close(shard.tensor.grad(),
                   part(plain.items->weight.grad(), shard.metadata.shard_offsets, shard.metadata.shard_sizes),
                   "clipped");
  });
}

TEST(ShardedGradients, AreThoseOfTheTensorAndOfItsShards) {
  on_ranks(3, [](int64_t rank) {  // the last has no shard
    const ShardedTensor weight = ones(chunks(0, {0, 1, 0}), {6, 2}, {.requires_grad = true});
    const at::Tensor tensor = weight;
    auto backward = [&](double factor) {
      at::Tensor loss = at::zeros({});
      for (const at::Tensor& local : weight.local_tensors()) loss = loss + (local * factor).sum();
      loss.backward();
    };
    auto is = [&](double value) {
      bool same = tensor.grad().defined() &&
                  ShardedTensor(tensor.grad()).local_shards().size() == weight.local_shards().size();
      for (size_t i = 0; same && i < weight.local_shards().size(); ++i) {
        const at::Tensor& local = weight.local_shards()[i].tensor;
        same = local.grad().is_same(ShardedTensor(tensor.grad()).local_shards()[i].tensor) &&
               (local.grad() == value).all().item<bool>();
      }
      return same;
    };
    EXPECT_FALSE(tensor.grad().defined());
    backward(3);
    EXPECT_TRUE(is(3));
    EXPECT_FALSE(tensor.grad().requires_grad());
    backward(1);
    EXPECT_TRUE(is(4));
    tensor.grad().mul_(2);
    EXPECT_TRUE(is(8));
    tensor.mutable_grad().zero_();
    EXPECT_TRUE(is(0));
    tensor.mutable_grad().reset();
    for (const at::Tensor& local : weight.local_tensors()) EXPECT_FALSE(local.grad().defined());
    EXPECT_FALSE(tensor.grad().defined());
    tensor.mutable_grad() = at::full_like(tensor, 5);
    EXPECT_TRUE(is(5));
    for (const at::Tensor& local : weight.local_tensors()) local.mutable_grad().reset();
    EXPECT_FALSE(tensor.grad().defined());
    tensor.mutable_grad() = at::full_like(tensor, 5);
    backward(1);  // adds to what was put there, though nobody looked since
    EXPECT_TRUE(is(6));
    // What was computed before the gradient was forgotten does not add to it.
    at::Tensor loss = at::zeros({});
    for (const at::Tensor& local : weight.local_tensors()) loss = loss + local.sum();
    loss.backward({}, /*retain_graph=*/true);
    tensor.mutable_grad().reset();
    loss.backward();
    EXPECT_TRUE(is(1));
    // The gradient of a shard that no loss depends on is zero, if that of the others is not.
    tensor.mutable_grad().reset();
    weight.local_tensors()[0].sum().backward();
    if (rank == 0) EXPECT_TRUE((weight.local_shards()[1].tensor.grad().defined()) || tensor.grad().defined());
    EXPECT_TRUE(tensor.grad().defined());
    if (rank == 0) EXPECT_TRUE((weight.local_shards()[1].tensor.grad() == 0).all().item<bool>());

    tensor.mutable_grad() = at::ones({6, 2});
    expect_error<c10::Error>([&] { tensor.grad(); }, {"grad", "plain", "shard_tensor"});
    EXPECT_TRUE(tensor.grad().defined());  // that from before
    tensor.mutable_grad() = ones(chunks(1, {0, 1}), {6, 2});
    expect_error<c10::Error>([&] { tensor.grad(); }, {"sharded differently"});
    tensor.mutable_grad().reset();

    // It is released with the tensor, though its shards have known of it.
    const c10::weak_intrusive_ptr<c10::TensorImpl> shard(weight.local_tensors()[0].getIntrusivePtr());
    ShardedTensor other = deepcopy(weight);
    const c10::weak_intrusive_ptr<c10::TensorImpl> gone(other.local_tensors()[0].getIntrusivePtr());
    other.mutable_grad();
    other = {};
    EXPECT_TRUE(gone.expired());
    EXPECT_FALSE(shard.expired());
  });
}

TEST(ShardedGradients, RequiresGradIsOneTruthToo) {
  on_ranks(3, [](int64_t rank) {
    const ShardedTensor tensor = zeros(chunks(0, {0, 1, 0}), {6, 2});
    if (rank < 2) tensor.local_tensors().back().requires_grad_();
    EXPECT_EQ(tensor.requires_grad(), rank < 2);
    EXPECT_EQ(at::Tensor(tensor).requires_grad(), rank < 2);
    for (const at::Tensor& local : tensor.local_tensors()) EXPECT_EQ(local.requires_grad(), rank < 2);
    EXPECT_EQ(tensor.metadata().tensor_properties.requires_grad, rank < 2);
    // A rank that has nothing cannot know: lookups would wait for it in backward.
    expect_error<c10::Error>([&] { at::embedding(tensor, at::zeros({1}, at::kLong)); },
                             {"rank 2", "rank 0", "requires_grad_()"});
    tensor.requires_grad_();
    at::embedding(tensor, at::zeros({1}, at::kLong)).sum().backward();
    EXPECT_TRUE(tensor.grad().defined());
    tensor.requires_grad_(false);
    for (const at::Tensor& local : tensor.local_tensors()) EXPECT_FALSE(local.requires_grad());
    if (rank < 2) tensor.local_tensors()[0].requires_grad_();
    if (rank < 2) EXPECT_TRUE(tensor.requires_grad());
    // What is computed of it is no leaf.
    tensor.requires_grad_();
    const ShardedTensor copy = at::Tensor(tensor).clone();
    EXPECT_TRUE(copy.requires_grad() && !copy.is_leaf());
    EXPECT_THROW(at::Tensor(copy).requires_grad_(false), c10::Error);
    EXPECT_THROW(torch::optim::SGD({copy}, torch::optim::SGDOptions(0.1)), c10::Error);
  });
}

TEST(ShardedGradients, WhatCannotWorkSaysSo) {
  on_ranks(2, [](int64_t rank) {
    Recommender model;
    shard_module(model, [] {
      ShardingPlan plan;
      plan.plan["items.weight"] = chunks(0, {0, 1}).clone();
      return plan;
    }());
    const ShardedTensor weight(model.items->weight);
    model.forward(rank).square().sum().backward();
    torch::optim::LBFGS lbfgs(model.parameters(), torch::optim::LBFGSOptions(0.1));
    expect_error<c10::Error>([&] { lbfgs.step([] { return at::ones({}); }); },
                             {"does not work on sharded tensors", "gather()"});
    expect_error<c10::Error>(
        [&] {
          ShardedOptimizer(named_params_with_sharded_tensor(model),
                           ShardedOptimizer::of<torch::optim::LBFGS>(torch::optim::LBFGSOptions(0.1)));
        },
        {"LBFGS", "Gather"});
    torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    sgd.step();
    torch::serialize::OutputArchive archive;
    std::ostringstream stream;
    expect_error<c10::Error>(
        [&] {
          sgd.save(archive);
          archive.save_to(stream);
        },
        {"ShardedTensor", "local_shards()"});
    expect_error<c10::Error>([&] { at::norm(weight); }, {"norm", "detach()"});
    expect_error<c10::Error>(
        [&] {
          at::Tensor(weight).register_hook([](const at::Tensor&) {});
          model.forward(rank);
        },
        {"hook", "local_tensors()"});
  });
}

TEST(ShardedGradients, BackwardTakesAShardedInput) {
  on_ranks(2, [](int64_t rank) {
    Recommender model;
    shard_module(model, [] {
      ShardingPlan plan;
      plan.plan["items.weight"] = chunks(0, {0, 1}).clone();
      return plan;
    }());
    const ShardedTensor weight(model.items->weight);
    auto loss = [&] { return model.forward(rank).square().sum(); };
    loss().backward();
    const at::Tensor expected = weight.local_tensor().grad().clone();
    model.zero_grad();
    loss().backward({}, std::nullopt, false, std::vector<at::Tensor>{weight});
    EXPECT_TRUE(weight.local_tensor().grad().equal(expected));
    for (const at::Tensor& parameter : model.parameters()) {
      if (!parameter.is_same(weight)) EXPECT_FALSE(parameter.grad().defined());
    }
    expect_error<c10::Error>([&] { torch::autograd::grad({loss()}, {weight}); }, {"grad", "local_tensors()"});
    EXPECT_TRUE(torch::autograd::grad({loss()}, {weight.local_tensor()})[0].equal(expected));
  });
}

TEST(ShardedGradients, BackwardTakesAllOfSeveralLocalShards) {
  on_ranks(1, [](int64_t) {
    const ShardedTensor weight = ones(chunks(0, {0, 0}), {4, 2});
    at::Tensor(weight).requires_grad_();
    const std::vector<at::Tensor> locals = weight.local_tensors();
    ASSERT_EQ(locals.size(), 2u);
    auto loss = [&] { return (locals[0] + locals[1]).sum(); };
    expect_error<c10::Error>(
        [&] { loss().backward({}, std::nullopt, false, std::vector<at::Tensor>{weight}); },
        {"backward", "local_tensors()"});
    loss().backward({}, std::nullopt, false, locals);
    EXPECT_TRUE(at::Tensor(weight).grad().defined());
  });
}

// The optimiser and the gradients go on, as they do where modules have plain parameters.
TEST(ShardedGradients, StayWhenAModuleIsMoved) {
  on_ranks(3, [](int64_t rank) {
    Recommender model;
    shard_module(model, [] {
      ShardingPlan plan;
      plan.plan["items.weight"] = chunks(0, {0, 1}).clone();
      return plan;
    }());
    ShardedOptimizer optimizer(named_params_with_sharded_tensor(model),
                               ShardedOptimizer::of<torch::optim::SGD>(torch::optim::SGDOptions(1)));
    const ShardedTensor weight(model.items->weight);
    const at::Tensor local = weight.local_tensors()[0];
    model.forward(rank).sum().backward();
    model.to(at::kDouble);
    EXPECT_EQ(local.scalar_type(), at::kDouble);
    EXPECT_TRUE(weight.local_tensors()[0].is_same(local) && weight.grad().defined());
    optimizer.zero_grad();
    EXPECT_FALSE(weight.grad().defined());
    const at::Tensor before = local.detach().clone();
    model.forward(rank).sum().backward();
    optimizer.step();
    EXPECT_TRUE(at::equal(local.detach(), before - local.grad()));
    if (rank < 2) EXPECT_FALSE(at::equal(local.detach(), before));
    EXPECT_TRUE(weight.requires_grad() && local.is_leaf());
  });
}

/// Shards the bias of a layer, in place; or puts another layer in its place.
struct BiasSharder : Sharder {
  bool replaces = false;
  std::shared_ptr<torch::nn::Module> shard(std::shared_ptr<torch::nn::Module> module) override {
    if (replaces) return std::make_shared<torch::nn::LinearImpl>(1, 1);
    shard_parameter(*module, "bias", chunks(0, {0, 1}));
    return module;
  }
};

struct Planner : ShardingPlanner {
  ShardingPlan build_plan(const torch::nn::Module& module) override {
    ShardingPlan plan;
    for (const auto& item : module.named_parameters()) {
      if (item.value().dim() == 2) plan.plan[item.key()] = chunks(0, {0, 1}).clone();
    }
    return plan;
  }
};

TEST(ShardModule, PlannersAndSharders) {
  on_ranks(2, [](int64_t) {
    Recommender model;
    Planner planner;
    shard_module(model, planner.build_plan(model));
    for (const auto& item : model.named_parameters())
      EXPECT_EQ(ShardedTensor::is_sharded_tensor(item.value()), item.value().dim() == 2) << item.key();

    Recommender other;
    auto sharder = std::make_shared<BiasSharder>();
    ShardingPlan plan;
    plan.plan["top"] = sharder;
    shard_module(other, plan);
    EXPECT_TRUE(ShardedTensor::is_sharded_tensor(other.top->bias));
    sharder->replaces = true;
    shard_module(other, plan);
    EXPECT_EQ(other.named_parameters()["top.weight"].numel(), 1);
  });
}

TEST(ShardModule, Errors) {
  on_ranks(2, [](int64_t) {
    Recommender model;
    const auto spec = chunks(0, {0, 1}).clone();
    auto fails = [&](ShardingPlan plan, std::string_view part) {
      const std::string message = error_of([&] { shard_module(model, plan); });
      EXPECT_NE(message.find(part), std::string::npos) << message;
    };
    ShardingPlan plan;
    plan.plan["nothing.weight"] = spec;
    fails(plan, "no submodule \"nothing\"; it has: items, users, top");
    plan.plan = {{"top.wieght", spec}};
    fails(plan, "wieght");
    plan.plan = {{"top.weight", ShardingSpecPtr()}};
    fails(plan, "null");
    plan.plan = {{"", std::make_shared<BiasSharder>()}};
    fails(plan, "root");
    plan.plan = {{"top", std::make_shared<BiasSharder>()}, {"top.weight", spec}};
    fails(plan, "has a sharder");
    plan.plan = {};
    plan.output_plan = {{"bottom", spec}};
    fails(plan, "bottom");
    plan.output_plan = {{"top", nullptr}};
    fails(plan, "no spec");
    plan.output_plan = {};
    plan.return_local_tensor = {"bottom"};
    fails(plan, "bottom");
    for (const auto& item : model.named_parameters())
      EXPECT_FALSE(ShardedTensor::is_sharded_tensor(item.value()));
  });
}

/// Returns what it is given.
struct PassImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
};

TEST(ShardModule, Outputs) {
  on_ranks(4, [](int64_t rank) {
    const auto pass = std::make_shared<PassImpl>();
    const at::Tensor tensor = shard_tensor(global_tensor({4, 8}), chunks(1, {0, 1, 2, 3}));
    EXPECT_TRUE(call(pass, tensor).is_same(tensor));
    ShardingPlan plan;
    plan.output_plan[""] = chunks(0, {0, 1, 2, 3}).clone();
    shard_module(*pass, plan);
    EXPECT_TRUE(ShardedTensor(call(pass, tensor)).sharding_spec() == chunks(0, {0, 1, 2, 3}));
    collect_local_shard(*pass);
    EXPECT_TRUE(at::equal(call(pass, tensor), global_tensor({4, 8})[rank]));  // [8], not [1, 8]
    EXPECT_TRUE(at::equal(call(pass, at::ones({2})), at::ones({2})));
    EXPECT_TRUE(pass->parameters().empty());
  });
}

// --- optimisers

TEST(ShardedOptimizer, KnowsEachParameterOnce) {
  on_ranks(2, [](int64_t rank) {
    Recommender model;
    shard_parameter(*model.items, "weight", chunks(0, {0, 1, 0}));
    const auto named = named_params_with_sharded_tensor(model, "model");
    ASSERT_EQ(named.size(), 4);
    EXPECT_EQ(named[0].first, "model.items.weight");
    EXPECT_EQ(named_params_with_sharded_tensor(model, "", false).size(), 0);
    ShardedOptimizer optimizer(named, ShardedOptimizer::of<torch::optim::SGD>(torch::optim::SGDOptions(0.1)));
    EXPECT_EQ(optimizer.param_groups()[0].params().size(), rank == 0 ? 5 : 4);
    optimizer.add_param_group({{"more", at::ones({2}).requires_grad_()}},
                              std::make_unique<torch::optim::SGDOptions>(0.5));
    EXPECT_EQ(optimizer.param_groups().size(), 2);
    EXPECT_EQ(optimizer.named_params().size(), 5);
  });
}

TEST(ShardedOptimizer, StateIsSavedAndLoaded) {
  on_ranks(2, [](int64_t rank) {
    auto optimizer_of = [](const Recommender& model) {
      return ShardedOptimizer(named_params_with_sharded_tensor(model),
                              ShardedOptimizer::of<torch::optim::Adam>(torch::optim::AdamOptions(0.1)));
    };
    auto step = [&](Recommender& model, ShardedOptimizer& optimizer) {
      optimizer.zero_grad();
      model.forward(rank).square().sum().backward();
      optimizer.step();
    };
    Recommender model;
    shard_parameter(*model.items, "weight", chunks(0, {0, 1}));
    ShardedOptimizer optimizer = optimizer_of(model);
    step(model, optimizer);
    const std::string values = to_bytes(state_dict(model)), state = optimizer.state_dict();
    step(model, optimizer);

    Recommender resumed;
    load_state_dict(resumed, from_bytes(values));
    ShardedOptimizer other = optimizer_of(resumed);
    other.load_state_dict(state);
    step(resumed, other);
    EXPECT_TRUE(at::equal(resumed.items->weight, model.items->weight));
    EXPECT_TRUE(at::equal(resumed.users->weight, model.users->weight));

    Recommender plain;
    ShardedOptimizer wrong = optimizer_of(plain);
    expect_error<c10::Error>([&] { wrong.load_state_dict(state); }, {"other parameters"});
    EXPECT_THROW(optimizer.load_state_dict("nonsense"), c10::Error);
  });
}

// --- saved and loaded

TEST(ShardedState, TensorsComeBack) {
  on_ranks(4, [](int64_t) {
    for (const auto& spec : {chunks(0, {0, 1, 2, 3}), chunks(1, {2, 2, 0})}) {
      const ShardedTensor tensor = rand(spec, {5, 7}, {.requires_grad = true});
      const ShardedTensor loaded = ShardedTensor::from_bytes(tensor.to_bytes());
      EXPECT_EQ(loaded.metadata(), tensor.metadata());
      EXPECT_TRUE(loaded.sharding_spec() == tensor.sharding_spec());
      EXPECT_TRUE(loaded.requires_grad());
      EXPECT_TRUE(at::equal(loaded, tensor));
      for (const LocalShard& shard : loaded.local_shards()) EXPECT_TRUE(shard.tensor.is_leaf());
    }
  });
}

/// Not only their memory: it may be that of the conjugate or negative.
TEST(ShardedState, ValuesAreSaved) {
  const at::Tensor numbers = at::complex(at::arange(3, at::kFloat), at::ones({3}));
  const TensorDict state{{"conjugate", numbers.conj()}, {"negative", at::imag(numbers.conj())}};
  ASSERT_TRUE(state.at("conjugate").is_conj() && state.at("negative").is_neg());
  for (const auto& [name, tensor] : from_bytes(to_bytes(state)))
    EXPECT_TRUE(at::equal(tensor, state.at(name))) << name << tensor;
}

TEST(ShardedState, OtherRanksOrWorldsAreErrors) {
  std::vector<std::string> saved(4);
  on_ranks(4, [&](int64_t rank) { saved[rank] = ones(chunks(0, {0, 1, 2, 3}), {8}).to_bytes(); });
  on_ranks(4, [&](int64_t rank) {
    expect_error<c10::Error>([&] { ShardedTensor::from_bytes(saved[(rank + 1) % 4]); },
                             {"saved with group rank"});
    const Group reversed = current_world()->group({3, 2, 1, 0}, at::kCPU);
    const LoadWithProcessGroup load(reversed);
    expect_error<c10::Error>([&] { ShardedTensor::from_bytes(saved[rank]); }, {"group rank"});
    expect_error<c10::Error>([&] { LoadWithProcessGroup again({0}); }, {"already"});
  });
  on_ranks(2, [&](int64_t rank) {
    expect_error<c10::Error>([&] { ShardedTensor::from_bytes(saved[rank]); }, {"of size 4", "with 2"});
  });
  const std::string bytes = saved[0];
  on_ranks(4, [&](int64_t) {
    for (size_t size = 0; size < bytes.size(); size += 3)
      EXPECT_THROW(ShardedTensor::from_bytes(std::string_view(bytes).substr(0, size)), c10::Error);
  });
  EXPECT_THROW(ShardedTensor::from_bytes(saved[0]), c10::Error);  // no ranks here
}

TEST(ShardedState, LoadsOntoAGroup) {
  on_ranks(4, [](int64_t rank) {
    if (rank < 2) return;
    const Group group = current_world()->group({2, 3}, at::kCPU);
    const ShardedTensor tensor = rand(chunks(0, {2, 3}), {4, 2}, {.process_group = group});
    const LoadWithProcessGroup load(group);
    EXPECT_TRUE(at::equal(ShardedTensor::from_bytes(tensor.to_bytes()), tensor));
  });
}

TEST(ShardedState, ModulesAreSavedAndLoaded) {
  on_ranks(4, [](int64_t rank) {
    Recommender model;
    shard_module(model, both_tables());
    const TensorDict state = state_dict(model, "model.");
    ASSERT_EQ(state.size(), 4);
    EXPECT_TRUE(state.at("model.items.weight").is_same(model.items->weight));
    TensorDict hooked;
    state_dict_hook(model, hooked);
    EXPECT_EQ(hooked.size(), 2);
    EXPECT_TRUE(hooked.contains("users.weight"));

    const TensorDict loaded = from_bytes(to_bytes(state));
    Recommender other;
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : other.parameters()) parameter.zero_();
    }
    load_state_dict(other, loaded, true, "model.");
    EXPECT_TRUE(ShardedTensor::is_sharded_tensor(other.items->weight));
    EXPECT_TRUE(other.items->weight.is_same(loaded.at("model.items.weight")));
    expect_close(other.forward(rank).detach(), model.forward(rank).detach(), "loaded");

    Recommender third;
    pre_load_state_dict_hook(third, hooked);
    EXPECT_TRUE(third.users->weight.is_same(model.users->weight));
    EXPECT_FALSE(ShardedTensor::is_sharded_tensor(third.top->weight));
  });
}

// Whoever holds a parameter goes on with the loaded one, or it is an error.
TEST(ShardedState, OptimisersGoOnWithWhatIsLoaded) {
  on_ranks(2, [](int64_t rank) {
    Recommender model;
    shard_parameter(*model.items, "weight", chunks(0, {0, 1}));
    const TensorDict saved = from_bytes(to_bytes(state_dict(model)));
    torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1));
    const at::Tensor weight = model.items->weight;
    model.forward(rank).sum().backward();
    optimizer.step();
    EXPECT_FALSE(at::equal(weight, saved.at("items.weight")));
    load_state_dict(model, saved);
    EXPECT_TRUE(model.items->weight.is_same(weight) && at::equal(weight, saved.at("items.weight")));
    model.forward(rank).sum().backward();
    optimizer.step();
    EXPECT_FALSE(at::equal(weight, saved.at("items.weight")));

    TensorDict otherwise = saved;
    otherwise["items.weight"] = ShardedTensor(saved.at("items.weight")).reshard(chunks(1, {0, 1}));
    expect_error<c10::Error>([&] { load_state_dict(model, otherwise); }, {"items.weight", "optimiser"});
    EXPECT_TRUE(model.items->weight.is_same(weight));
  });
}

TEST(ShardedState, LoadingIsStrict) {
  on_ranks(2, [](int64_t) {
    Recommender model;
    TensorDict state = state_dict(model);
    state.erase("top.bias");
    state["bottom"] = at::ones({1});
    expect_error<c10::Error>([&] { load_state_dict(model, state); },
                             {"missing: top.bias", "not in the module: bottom"});
    EXPECT_NO_THROW(load_state_dict(model, state, false));
    state = state_dict(model);
    state["top.bias"] = at::ones({7});
    expect_error<c10::ValueError>([&] { load_state_dict(model, state); }, {"top.bias", "[2]", "[7]"});
    state = state_dict(model);
    state["items.weight"] = zeros(chunks(0, {0, 1}), {5, 5});
    expect_error<c10::ValueError>([&] { load_state_dict(model, state); }, {"items.weight", "[5, 5]"});
    state = state_dict(model);
    shard_parameter(*model.items, "weight", chunks(0, {0, 1}));
    expect_error<c10::ValueError>([&] { load_state_dict(model, state); },
                                  {"items.weight", "sharded in the module"});
  });
}

TEST(ShardedModules, MoveAsModulesDo) {
  on_ranks(2, [](int64_t) {
    torch::nn::Linear linear(4, 4);
    shard_parameter(*linear, "weight", chunks(0, {0, 1}));
    linear->to(at::kDouble);
    EXPECT_EQ(linear->weight.scalar_type(), at::kDouble);
    const ShardedTensor weight(linear->weight);
    EXPECT_EQ(weight.local_tensor().scalar_type(), at::kDouble);
    EXPECT_TRUE(weight.requires_grad() && weight.local_tensor().requires_grad());
    EXPECT_EQ(weight.metadata().tensor_properties.dtype, at::kDouble);
    linear->zero_grad();
  });
}

}  // namespace
}  // namespace tessera::sharded
