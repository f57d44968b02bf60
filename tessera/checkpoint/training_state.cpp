// The state dict of a module, an optimizer and a scheduler of libtorch.

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/error.h>
#include <tessera/random/generator.h>

#include <algorithm>
#include <typeinfo>
#include <unordered_map>

#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/Type.h>
#include <c10/util/irange.h>
#include <torch/nn/module.h>
#include <torch/optim.h>

namespace tessera::checkpoint {

namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

// What libtorch's optimizers keep for each parameter, and their options: `visit(name, field)`.

template <class S, class Visit>
void visit_adam_state(S& state, const Visit& visit) {
  visit("step", state.step());
  visit("exp_avg", state.exp_avg());
  visit("exp_avg_sq", state.exp_avg_sq());
  visit("max_exp_avg_sq", state.max_exp_avg_sq());
}

template <class Visit>
void visit_state(OptimizerParamState& any, const Visit& visit) {
  if (auto* adam = dynamic_cast<torch::optim::AdamParamState*>(&any)) {
    visit_adam_state(*adam, visit);
  } else if (auto* adamw = dynamic_cast<torch::optim::AdamWParamState*>(&any)) {
    visit_adam_state(*adamw, visit);
  } else if (auto* sgd = dynamic_cast<torch::optim::SGDParamState*>(&any)) {
    visit("momentum_buffer", sgd->momentum_buffer());
  } else if (auto* adagrad = dynamic_cast<torch::optim::AdagradParamState*>(&any)) {
    visit("step", adagrad->step());
    visit("sum", adagrad->sum());
  } else if (auto* rmsprop = dynamic_cast<torch::optim::RMSpropParamState*>(&any)) {
    visit("step", rmsprop->step());
    visit("square_avg", rmsprop->square_avg());
    visit("momentum_buffer", rmsprop->momentum_buffer());
    visit("grad_avg", rmsprop->grad_avg());
  } else {
    TESSERA_CHECK(false, "StateDict::of does not know what ", c10::demangle(typeid(any).name()),
                  " holds. Known are SGD, Adam, AdamW, Adagrad and RMSprop: put the state of other "
                  "optimizers into a state "
                  "dict by hand, with on_load to put it back.");
  }
}

template <class O, class Visit>
void visit_adam_options(O& options, const Visit& visit) {
  visit("lr", options.lr());
  visit("beta1", std::get<0>(options.betas()));
  visit("beta2", std::get<1>(options.betas()));
  visit("eps", options.eps());
  visit("weight_decay", options.weight_decay());
  visit("amsgrad", options.amsgrad());
}

template <class Visit>
void visit_options(OptimizerOptions& any, const Visit& visit) {
  if (auto* adam = dynamic_cast<torch::optim::AdamOptions*>(&any)) {
    visit_adam_options(*adam, visit);
  } else if (auto* adamw = dynamic_cast<torch::optim::AdamWOptions*>(&any)) {
    visit_adam_options(*adamw, visit);
  } else if (auto* sgd = dynamic_cast<torch::optim::SGDOptions*>(&any)) {
    visit("lr", sgd->lr());
    visit("momentum", sgd->momentum());
    visit("dampening", sgd->dampening());
    visit("weight_decay", sgd->weight_decay());
    visit("nesterov", sgd->nesterov());
  } else if (auto* adagrad = dynamic_cast<torch::optim::AdagradOptions*>(&any)) {
    visit("lr", adagrad->lr());
    visit("lr_decay", adagrad->lr_decay());
    visit("weight_decay", adagrad->weight_decay());
    visit("initial_accumulator_value", adagrad->initial_accumulator_value());
    visit("eps", adagrad->eps());
  } else if (auto* rmsprop = dynamic_cast<torch::optim::RMSpropOptions*>(&any)) {
    visit("lr", rmsprop->lr());
    visit("alpha", rmsprop->alpha());
    visit("eps", rmsprop->eps());
    visit("weight_decay", rmsprop->weight_decay());
    visit("momentum", rmsprop->momentum());
    visit("centered", rmsprop->centered());
  } else {
    TESSERA_CHECK(false, "StateDict::of does not know the options ", c10::demangle(typeid(any).name()),
                  ". Known are those of SGD, Adam, AdamW, Adagrad and RMSprop.");
  }
}

/// An empty state of the kind that the optimizer has.
std::unique_ptr<OptimizerParamState> new_state(const Optimizer& optimizer) {
  if (dynamic_cast<const torch::optim::Adam*>(&optimizer))
    return std::make_unique<torch::optim::AdamParamState>();
  if (dynamic_cast<const torch::optim::AdamW*>(&optimizer))
    return std::make_unique<torch::optim::AdamWParamState>();
  if (dynamic_cast<const torch::optim::SGD*>(&optimizer))
    return std::make_unique<torch::optim::SGDParamState>();
  if (dynamic_cast<const torch::optim::Adagrad*>(&optimizer))
    return std::make_unique<torch::optim::AdagradParamState>();
  if (dynamic_cast<const torch::optim::RMSprop*>(&optimizer))
    return std::make_unique<torch::optim::RMSpropParamState>();
  TESSERA_CHECK(false, "StateDict::of does not know the optimizer ", c10::demangle(typeid(optimizer).name()),
                ". Known are SGD, Adam, AdamW, Adagrad and RMSprop.");
}

void put(Value& dict, const char* name, const at::Tensor& field) {
  if (field.defined()) dict[name] = field;
}
void put(Value& dict, const char* name, int64_t field) { dict[name] = field; }
void put(Value& dict, const char* name, double field) { dict[name] = field; }
void put(Value& dict, const char* name, bool field) { dict[name] = field; }

// Tensors were loaded in place.
void take(const Value&, const char*, at::Tensor&) {}
void take(const Value& dict, const char* name, int64_t& field) { field = dict.at(name).integer(); }
void take(const Value& dict, const char* name, double& field) { field = dict.at(name).number(); }
void take(const Value& dict, const char* name, bool& field) { field = dict.at(name).boolean(); }

Value value_of(OptimizerParamState& state) {
  Value result = Value::dict();
  visit_state(state, [&](const char* name, auto& field) { put(result, name, field); });
  return result;
}

/// An optimizer, and the names of its parameters.
class NamedOptimizer {
 public:
  NamedOptimizer(torch::nn::Module& module, Optimizer& optimizer) : optimizer_(&optimizer) {
    for (const auto& item : module.named_parameters())
      names_.emplace(item.value().unsafeGetTensorImpl(), item.key());
    for (const auto& group : optimizer.param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        TESSERA_CHECK_VALUE(
            names_.count(parameter.unsafeGetTensorImpl()), "The optimizer has a parameter of shape ",
            parameter.sizes(),
            " that is none of the module's, so it has no name to be saved by. Was the module parallelised "
            "after the optimizer was made? Make the optimizer last.");
      }
    }
  }

  Value values() const {
    Value result = Value::dict();
    Value& states = result["state"] = Value::dict();
    for_each_parameter([&](const std::string& name, const at::Tensor& parameter) {
      const auto found = optimizer_->state().find(parameter.unsafeGetTensorImpl());
      if (found != optimizer_->state().end()) states[name] = value_of(*found->second);
    });
    Value::List groups;
    for (auto& group : optimizer_->param_groups()) {
      Value options = Value::dict();
      Value::List parameters;
      for (const at::Tensor& parameter : group.params()) parameters.emplace_back(name_of(parameter));
      options["params"] = Value::list(std::move(parameters));
      visit_options(group.options(), [&](const char* name, auto& field) { put(options, name, field); });
      groups.push_back(std::move(options));
    }
    result["param_groups"] = Value::list(std::move(groups));
    return result;
  }

  /// Makes state where the checkpoint has some and the optimizer has not, and drops it where the checkpoint has none.
  void prepare(Value& values, const std::vector<std::string>& keys) const {
    Value& states = values.at("state");
    for_each_parameter([&](const std::string& name, const at::Tensor& parameter) {
      const std::string prefix = "optimizer.state." + name + ".";
      const auto has = [&](const std::string& field) {
        return std::binary_search(keys.begin(), keys.end(), prefix + field);
      };
      const auto first = std::lower_bound(keys.begin(), keys.end(), prefix);
      const bool is_saved = first != keys.end() && first->compare(0, prefix.size(), prefix) == 0;
      auto& known = optimizer_->state();
      if (!is_saved) {
        known.erase(parameter.unsafeGetTensorImpl());
        std::erase_if(states.entries(), [&](const Value::Entry& entry) { return entry.key == name; });
        return;
      }
      auto& state = known[parameter.unsafeGetTensorImpl()];
      if (!state) state = new_state(*optimizer_);
      visit_state(*state, [&](const char* field_name, auto& field) {
        if constexpr (std::is_same_v<std::decay_t<decltype(field)>, at::Tensor>) {
          if (!field.defined() && has(field_name)) field = at::zeros_like(parameter.detach());
        }
      });
      states[name] = value_of(*state);
    });
  }

  void take_back(const Value& values) const {
    const Value& states = values.at("state");
    for_each_parameter([&](const std::string& name, const at::Tensor& parameter) {
      if (!states.contains(name)) return;
      visit_state(*optimizer_->state().at(parameter.unsafeGetTensorImpl()),
                  [&](const char* field_name, auto& field) { take(states.at(name), field_name, field); });
    });
    const auto& groups = values.at("param_groups").items();
    for (const auto i : c10::irange(groups.size()))
      visit_options(optimizer_->param_groups()[i].options(),
                    [&](const char* name, auto& field) { take(groups[i], name, field); });
  }

 private:
  const std::string& name_of(const at::Tensor& parameter) const {
    return names_.at(parameter.unsafeGetTensorImpl());
  }

  template <class Use>
  void for_each_parameter(const Use& use) const {
    for (const auto& group : optimizer_->param_groups()) {
      for (const at::Tensor& parameter : group.params()) use(name_of(parameter), parameter);
    }
  }

  Optimizer* optimizer_;
  std::unordered_map<const void*, std::string> names_;
};

/// Reaches the position of a scheduler, which is protected.
struct SchedulerPosition : torch::optim::LRScheduler {
  static unsigned& of(torch::optim::LRScheduler& scheduler) {
    return scheduler.*(&SchedulerPosition::step_count_);
  }
};

void add_random(StateDict& state) {
  Value& random = state["random"] = Value::dict();
  random["distributed"] = random::default_generator().state().str();
  random["cpu"] = at::detail::getDefaultCPUGenerator().get_state();
  state.on_load([](const Value& values) {
    random::default_generator().set_state(random::State::parse(values.at("random").at("distributed").text()));
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(generator.mutex());
    generator.set_state(values.at("random").at("cpu").tensor());
  });
}

}  // namespace

StateDict StateDict::of(torch::nn::Module& module) {
  StateDict state;
  Value& model = state["model"] = Value::dict();
  for (const auto& item : module.named_parameters()) model[item.key()] = item.value();
  for (const auto& item : module.named_buffers()) model[item.key()] = item.value();
  return state;
}

StateDict StateDict::of(torch::nn::Module& module, Optimizer& optimizer) {
  StateDict state = of(module);
  const NamedOptimizer named(module, optimizer);
  state["optimizer"] = named.values();
  state.before_load([named](Value& values, const std::vector<std::string>& keys) {
    named.prepare(values.at("optimizer"), keys);
  });
  state.on_load([named](const Value& values) { named.take_back(values.at("optimizer")); });
  add_random(state);
  return state;
}

StateDict StateDict::of(torch::nn::Module& module, Optimizer& optimizer,
                        torch::optim::LRScheduler& scheduler) {
  StateDict state = of(module, optimizer);
  state["scheduler"]["step_count"] = static_cast<int64_t>(SchedulerPosition::of(scheduler));
  state.on_load([&scheduler](const Value& values) {
    SchedulerPosition::of(scheduler) =
        static_cast<unsigned>(values.at("scheduler").at("step_count").integer());
  });
  return state;
}

}  // namespace tessera::checkpoint
