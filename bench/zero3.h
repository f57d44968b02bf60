#pragma once

#include <tessera/comm/collectives.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn.h>

#include "examples/train_gpt/gpt.h"

/// Fully sharded training by hand, for the GPT of examples/train_gpt alone: the parameters of each block lie one after
/// the other in one flat tensor, of which each rank has a shard. The order of the blocks is known, so the next one is
/// gathered while one computes, and gradients are reduced while backward goes on.
namespace zero3 {

/// The flat parameters of one block, or of the rest of the model.
class Unit : public torch::CustomClassHolder {
 public:
  /// `handles`: the members that modules compute with.
  Unit(std::vector<at::Tensor*> handles, tessera::Group group)
      : handles_(std::move(handles)), group_(std::move(group)) {
    const at::NoGradGuard no_grad;
    const int64_t ranks = group_->getSize();
    std::vector<at::Tensor> rows;
    for (const at::Tensor* handle : handles_) {
      shapes_.push_back(handle->sizes().vec());
      rows.push_back(handle->detach().reshape(-1));
      size_ += rows.back().numel();
    }
    padded_ = (size_ + ranks - 1) / ranks * ranks;
    rows.push_back(at::zeros({padded_ - size_}));
    const at::Tensor flat = at::cat(rows);
    tessera::comm::broadcast(flat, 0, group_).wait();
    shard = flat.chunk(ranks)[group_->getRank()].clone().requires_grad_();
    full_ = at::empty({padded_});
    int64_t offset = 0;
    for (const auto& shape : shapes_) {
      const int64_t count = c10::multiply_integers(shape);
      views_.push_back(at::empty({0}).set_(full_.storage(), offset, shape, at::empty(shape).strides()));
      offset += count;
    }
    free();
  }

  at::Tensor shard;  // what is trained

  void start() {
    if (pending_ || gathered_) return;
    c10::StorageImpl& storage = *full_.storage().unsafeGetStorageImpl();
    storage.set_data_ptr_noswap(c10::GetCPUAllocator()->allocate(storage.nbytes()));
    pending_.emplace(tessera::comm::all_gather_into(full_, shard.detach(), group_));
  }
  void gather() {
    start();
    if (pending_) pending_->wait();
    pending_.reset();
    gathered_ = true;
  }
  void free() {
    gathered_ = false;
    full_.storage().unsafeGetStorageImpl()->set_data_ptr_noswap({nullptr, at::kCPU});
  }
  /// Lets the modules compute with these.
  void set(const std::vector<at::Tensor>& parameters) {
    for (size_t i = 0; i < handles_.size(); ++i) *handles_[i] = parameters[i];
  }
  const std::vector<at::Tensor>& views() const { return views_; }

  void reduce(torch::autograd::variable_list& gradients) {
    free();
    input_ = at::empty({padded_});
    int64_t offset = 0;
    for (at::Tensor& gradient : gradients) {
      input_.narrow(0, offset, gradient.numel()).view(gradient.sizes()).copy_(gradient);
      offset += gradient.numel();
      gradient.reset();
    }
    input_.narrow(0, size_, padded_ - size_).zero_();
    gradient_ = at::empty_like(shard);
    reduction_.emplace(tessera::comm::reduce_scatter_from(gradient_, input_, c10d::ReduceOp::SUM, group_));
  }
  void finish() {
    reduction_->wait();
    reduction_.reset();
    input_.reset();
    shard.mutable_grad() = gradient_.div_(group_->getSize());
  }

 private:
  std::vector<at::Tensor*> handles_;
  tessera::Group group_;
  std::vector<std::vector<int64_t>> shapes_;
  int64_t size_ = 0, padded_ = 0;
  at::Tensor full_, input_, gradient_;
  std::vector<at::Tensor> views_;
  std::optional<tessera::comm::Pending> pending_, reduction_;
  bool gathered_ = false;
};
using UnitRef = c10::intrusive_ptr<Unit>;

/// From the shard to the parameters, and from their gradients to the shard's.
struct Gather : torch::autograd::Function<Gather> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, const at::Tensor&,
                                                const UnitRef& unit) {
    context->saved_data["unit"] = c10::IValue::make_capsule(unit);
    unit->gather();
    torch::autograd::variable_list parameters;
    for (const at::Tensor& view : unit->views()) parameters.push_back(view.variable_data());
    return parameters;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    static_cast<Unit*>(context->saved_data["unit"].toCapsule().get())->reduce(gradients);
    return {at::Tensor(), at::Tensor()};  // the gradient comes when the reduction ends
  }
};

class Model {
 public:
  Model(const gpt::Config& config, const tessera::Group& group) : model_(config) {
    for (const auto& each : *model_->blocks) {
      auto& block = *each->as<gpt::Block>();
      units_.push_back(c10::make_intrusive<Unit>(
          std::vector<at::Tensor*>{&block.norm1->weight, &block.norm1->bias, &block.qkv->weight,
                                   &block.qkv->bias, &block.projection->weight, &block.projection->bias,
                                   &block.norm2->weight, &block.norm2->bias, &block.up->weight,
                                   &block.up->bias, &block.down->weight, &block.down->bias},
          group));
    }
    rest_ = c10::make_intrusive<Unit>(
        std::vector<at::Tensor*>{&model_->tokens->weight, &model_->positions, &model_->norm->weight,
                                 &model_->norm->bias, &model_->head->weight},
        group);
  }

  std::vector<at::Tensor> shards() const {
    std::vector<at::Tensor> result{rest_->shard};
    for (const UnitRef& unit : units_) result.push_back(unit->shard);
    return result;
  }

  /// The logits, as GPTImpl::forward.
  at::Tensor forward(const at::Tensor& text) {
    rest_->set(Gather::apply(rest_->shard, rest_));
    at::Tensor x = model_->tokens(text) + model_->positions.slice(0, 0, text.size(1));
    for (size_t i = 0; i < units_.size(); ++i) {
      const UnitRef unit = units_[i];
      const auto parameters = Gather::apply(unit->shard, unit);
      if (i + 1 < units_.size()) units_[i + 1]->start();
      unit->set(parameters);
      x = model_->blocks[i]->as<gpt::Block>()->forward(x);
      if (i + 1 == units_.size()) break;  // backward needs the last one first
      unit->free();
      x.register_hook([unit, before = i > 0 ? units_[i - 1] : UnitRef()](const at::Tensor&) {
        unit->gather();
        if (before) before->start();
      });
    }
    return model_->head(model_->norm(x));
  }

  /// After backward.
  void finish() {
    for (const UnitRef& unit : units_) unit->finish();
    rest_->finish();
  }

 private:
  gpt::GPT model_;
  std::vector<UnitRef> units_;
  UnitRef rest_;
};

}  // namespace zero3
