// A mixture of experts on four ranks, mesh(dp=2, ep=2): each rank has a quarter of the tokens and half of the
// experts. Tokens go to the ranks of their experts by all-to-all, and come back. It trains as on one device.

#include <tessera/tessera.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <optional>
#include <vector>

#include <torch/nn.h>
#include <torch/optim.h>

using namespace tessera;

constexpr int64_t kTokens = 64, kFeatures = 16, kHidden = 32, kExperts = 8, kChosen = 2;

struct MixtureImpl : torch::nn::Module {
  MixtureImpl() {
    router = register_parameter("router", torch::randn({kFeatures, kExperts}));
    up = register_parameter("up", torch::randn({kExperts, kFeatures, kHidden}) * 0.2);
    down = register_parameter("down", torch::randn({kExperts, kHidden, kFeatures}) * 0.2);
  }

  at::Tensor forward(const at::Tensor& x) const {
    const auto [weights, chosen] = x.mm(router).softmax(-1).topk(kChosen);
    if (!mesh) return experts(x, chosen, weights, up, down);
    const OptionalPlacements tokens{{Shard(0), Shard(0)}}, parameters{{Replicate(), Shard(0)}};
    // Each rank along "dp" has the gradients that come from its own tokens.
    const OptionalPlacements gradients{{Partial(), Shard(0)}};
    const auto mapped = local_map([this](const auto&... tensors) { return experts(tensors...); },
                                  {.out_placements = {tokens},
                                   .in_placements = {tokens, tokens, tokens, parameters, parameters},
                                   .in_grad_placements = {tokens, tokens, tokens, gradients, gradients}});
    return mapped(x, chosen, weights, up, down);
  }

  /// Of plain tensors: the tokens of this rank, and its experts.
  at::Tensor experts(const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& weights,
                     const at::Tensor& of_up, const at::Tensor& of_down) const {
    const int64_t here = of_up.size(0);
    at::Tensor expert = chosen.flatten();
    const at::Tensor order = expert.argsort();  // by expert, and so by rank
    const at::Tensor token = order.div(kChosen, "floor");
    at::Tensor rows = x.index_select(0, token);
    expert = expert.index_select(0, order);
    std::vector<int64_t> sent, received;
    if (mesh) {
      const at::Tensor counts = expert.bincount({}, kExperts).view({-1, here}).sum(1);
      sent.assign(counts.const_data_ptr<int64_t>(), counts.const_data_ptr<int64_t>() + counts.numel());
      received = exchange_sizes(sent, *mesh, "ep");
      rows = all_to_all_single(rows, received, sent, *mesh, "ep");
      expert = all_to_all_single(expert.remainder(here), received, sent, *mesh, "ep");
    }
    const at::Tensor grouped = expert.argsort();
    const at::Tensor ends = expert.bincount({}, here).cumsum(0, at::kInt);
    at::Tensor result = rows.index_select(0, grouped);
    result = at::_grouped_mm(at::silu(at::_grouped_mm(result, of_up, ends)), of_down, ends);
    result = result.index_select(0, grouped.argsort());
    if (mesh) result = all_to_all_single(result, sent, received, *mesh, "ep");
    const at::Tensor weight = weights.flatten().index_select(0, order).unsqueeze(1);
    return at::zeros_like(x).index_add(0, token, result * weight);
  }

  void distribute(const DeviceMesh& on) {
    mesh = on;
    distribute_module(*this, on, [](const std::string&, torch::nn::Module& module, const DeviceMesh& where) {
      for (const char* name : {"up", "down"})
        distribute_parameter(module, name, where, {Replicate(), Shard(0)});
    });
    replicate(*this, on);
  }

  at::Tensor router, up, down;
  std::optional<DeviceMesh> mesh;
};
TORCH_MODULE(Mixture);

/// The losses of some steps of training.
std::vector<double> train(Mixture& model, const at::Tensor& x, const at::Tensor& y) {
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  std::vector<double> losses;
  for (int step = 0; step < 20; ++step) {
    const at::Tensor loss = torch::mse_loss(x + model->forward(x), y);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

int main() {
  register_members<MixtureImpl>(&MixtureImpl::router, &MixtureImpl::up, &MixtureImpl::down);
  launch(4, [] {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "ep"});
    random::manual_seed(0);
    const DTensor x = randn({kTokens, kFeatures}, mesh, {Shard(0), Shard(0)});
    const DTensor y = randn({kTokens, kFeatures}, mesh, {Shard(0), Shard(0)});
    Mixture model, on_one_device;
    model->distribute(mesh);  // all ranks get the parameters of the first
    {
      const torch::NoGradGuard no_grad;
      for (const auto& each : on_one_device->named_parameters())
        each.value().copy_(DTensor(model->named_parameters()[each.key()]).full_tensor());
    }
    const CommDebugMode counts;
    const auto losses = train(model, x, y);
    const auto collectives = counts.get_comm_counts();
    const auto expected = train(on_one_device, x.full_tensor(), y.full_tensor());
    double difference = 0;
    for (size_t step = 0; step < losses.size(); ++step)
      difference = std::max(difference, std::abs(losses[step] - expected[step]));
    for (const auto& each : on_one_device->named_parameters()) {
      const at::Tensor full = DTensor(model->named_parameters()[each.key()]).full_tensor();
      difference = std::max(difference, (full - each.value()).abs().max().item<double>());
    }
    TORCH_CHECK(difference < 1e-4, "differs from one device by ", difference);
    if (mesh.get_rank() != 0) return;
    std::cout << "up is " << DTensor(model->up).spec() << "\nloss " << losses.front() << " -> "
              << losses.back()
              << ", as on one device\nall-to-alls of a step: " << collectives.at("all_to_all").calls / 20
              << '\n';
  });
}
