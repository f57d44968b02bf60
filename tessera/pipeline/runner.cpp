#include <tessera/bytes.h>
#include <tessera/comm/agreement.h>
#include <tessera/comm/collectives.h>
#include <tessera/comm/shared_error.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/pipeline/runner.h>
#include <tessera/pipeline/simulate.h>
#include <tessera/pipeline/tensor_meta.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

namespace tessera {

namespace {

using Tensors = PipelineStage::Tensors;

/// While alive, the gradients of a stage are reduced after its last micro-batch only.
class ReduceOnce {
 public:
  explicit ReduceOnce(const PipelineStage& stage) {
    for (auto& reduction : stage.reductions()) {
      if (reduction->enabled()) reductions_.push_back(std::move(reduction));
    }
  }
  ~ReduceOnce() { set(true); }
  ReduceOnce(const ReduceOnce&) = delete;
  ReduceOnce& operator=(const ReduceOnce&) = delete;

  void set(bool enabled) {
    for (const auto& reduction : reductions_) reduction->set_enabled(enabled);
  }

 private:
  std::vector<std::shared_ptr<GradientReduction>> reductions_;
};

/// A tensor on its way to this rank.
struct Arrival {
  TensorMeta meta;
  at::Tensor local;
  std::optional<comm::Pending> pending;  // none if it has no elements
};

/// What is kept of a stage and a micro-batch.
struct Slot {
  std::vector<Arrival> arrivals;     // inputs, later gradients of outputs
  Tensors inputs;                    // leaves
  Tensors outputs;                   // without a graph, until they are sent or the next stage has them
  torch::autograd::edge_list roots;  // of backward: the outputs that have a gradient, without their memory
  Tensors root_gradients;            // if they come from this rank
  Tensors input_gradients;           // until they are sent or the stage before has them
};

at::Tensor as_bytes(const std::string& text, at::DeviceType device) {
  const at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  copy_bytes(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes.to(device);
}

int64_t hash_of(const std::string& text) {
  const auto hash = static_cast<int64_t>(std::hash<std::string>()(text));
  return hash == 0 ? 1 : hash;
}

TensorMetas metas_of(const Tensors& tensors) {
  TensorMetas metas;
  for (const at::Tensor& tensor : tensors) metas.push_back(TensorMeta::of(tensor));
  return metas;
}

std::string list(const TensorMetas& metas) {
  std::string text;
  for (const TensorMeta& meta : metas) text += c10::str(text.empty() ? "" : ", ", meta.str());
  return text.empty() ? "nothing" : text;
}

std::string numbers(const std::vector<int64_t>& values) {
  std::string text;
  for (const int64_t value : values) text += c10::str(text.empty() ? "" : ", ", value);
  return text.empty() ? "none" : text;
}

}  // namespace

/// What lasts from step to step.
struct PipelineRunner::State {
  using Key = std::pair<int64_t, int64_t>;  // stage and micro-batch

  State(std::vector<PipelineStage> all, PipelineTable what)
      : stages(std::move(all)), table(std::move(what)), mesh(mesh_of(stages)), rank(mesh.get_local_rank()) {
    if (mesh.size() > 1) group = mesh.get_group();
    comm::agree("PipelineSchedule", group, [&] {
      check_stages();
      return c10::str(table.name, " with ", table.ranks(), " ranks, ", table.stages(), " stages and ",
                      table.microbatches, " micro-batches, table ", hash_of(table.str()));
    });
    for (const PipelineAction& action : table.actions[rank]) {
      if (action.kind == PipelineAction::Kind::backward) last_backward[action.stage] = action.microbatch;
    }
  }

  static DeviceMesh mesh_of(const std::vector<PipelineStage>& stages) {
    TESSERA_CHECK_VALUE(!stages.empty(), "A pipeline schedule needs the stages of this rank, but got none.");
    return stages[0].mesh();
  }

  void check_stages() const {
    check(table);
    TESSERA_CHECK_VALUE(table.ranks() == mesh.size(), "The pipeline schedule \"", table.name, "\" is for ",
                        table.ranks(), " ranks, but ", mesh, " has ", mesh.size(), ".");
    std::vector<int64_t> here;
    for (const PipelineStage& each : stages) {
      TESSERA_CHECK_VALUE(each.mesh() == mesh, "The stages of a pipeline are on one mesh, but one is on ",
                          mesh, " and one on ", each.mesh(), ".");
      TESSERA_CHECK_VALUE(each.num_stages() == table.stages(), "The pipeline schedule \"", table.name,
                          "\" has ", table.stages(), " stages, but stage ", each.stage_index(), " is one of ",
                          each.num_stages(), ".");
      here.push_back(each.stage_index());
    }
    TESSERA_CHECK_VALUE(here == table.stages_of(rank), "The pipeline schedule \"", table.name,
                        "\" has stages ", numbers(table.stages_of(rank)), " on rank ", rank, " of ", mesh,
                        ", but got stages ", numbers(here), ", in this order.");
  }

  bool has_stage(int64_t stage) const { return table.rank_of_stage[stage] == rank; }
  bool has_first() const { return has_stage(0); }
  bool has_last() const { return has_stage(table.stages() - 1); }
  int64_t rank_of(int64_t stage) const { return table.rank_of_stage[stage]; }
  const PipelineStage& stage(int64_t index) const {
    return *std::find_if(stages.begin(), stages.end(),
                         [&](const PipelineStage& each) { return each.stage_index() == index; });
  }

  const std::vector<PipelineStage> stages;
  const PipelineTable table;
  const DeviceMesh mesh;
  const int64_t rank;
  Group group;                               // null if there is one rank
  std::map<int64_t, int64_t> last_backward;  // the micro-batch that each stage of this rank computes last
  int64_t known = 0;                         // hash of the inputs for which the following holds; 0: none
  std::string trained;                       // which parameters of this rank's stages, then
  std::map<Key, TensorMetas> inputs, outputs;
  std::string failure;  // of an earlier step
};

/// One step: a run through the table.
class PipelineRunner::Step {
 public:
  Step(State& state, const PipelineBatch& batch) : state_(state), batch_(batch) {
    for (const PipelineStage& stage : state.stages)
      if (trains()) reduce_once_.try_emplace(stage.stage_index(), stage);
  }

  /// All ranks learn what the first stage knows, and whether any stage trains other parameters than before. If
  /// it throws on one, it does on all, and nothing has happened.
  void begin() {
    const comm::Agreement agreement("PipelineSchedule::step", state_.group, [&] {
      check_arguments();
      return c10::str(state_.table.name, trains() ? "" : ", without backward");
    });
    std::vector<int64_t> all(3 + state_.table.microbatches);
    if (state_.has_first()) all = heading();
    trained_ = trained();
    all[2] = trained_ != state_.trained;
    if (state_.group) {
      const at::Tensor given = at::tensor(all, at::kLong).to(device());
      const comm::Tensors copies(state_.table.ranks(), given);
      comm::Tensors got;
      for (int64_t i = 0; i < state_.table.ranks(); ++i) got.push_back(at::empty_like(given));
      comm::all_to_all(got, copies, state_.group).wait();
      const at::Tensor here = at::stack(got).sum(0).cpu();  // the others' headings are zero
      copy_bytes(all.data(), here.const_data_ptr(), here.nbytes());
    }
    inputs_hash_ = all[0];
    rule_ = all[1];
    sends_metas_ = inputs_hash_ != state_.known || all[2] != 0;
    samples_.assign(all.begin() + 3, all.end());
  }

  PipelineResult run() {
    TESSERA_CHECK_VALUE(
        !state_.has_last() || batch_.target_rule.empty() || rule_ == 0 ||
            rule_ == hash_of(batch_.target_rule),
        "The pipeline's targets (", batch_.target_rule,
        ") are split into micro-batches otherwise than its inputs. Give both the same number of rows, and "
        "if they are distributed, shard dim 0 of both over the same mesh dims.");
    for (const PipelineAction& action : state_.table.actions[state_.rank]) perform(action);
    for (auto& [peer, sends] : sends_) finish(sends);
    state_.known = inputs_hash_;
    state_.trained = trained_;
    return std::move(result_);
  }

 private:
  using Kind = PipelineAction::Kind;
  struct Sent {
    comm::Pending pending;
    at::Tensor tensor;  // lives until it is there
  };
  using Sends = std::vector<Sent>;

  bool trains() const { return state_.table.has_backward; }
  bool is_last(int64_t stage) const { return stage + 1 == state_.table.stages(); }
  at::DeviceType device() const { return state_.mesh.device_type(); }
  Slot& slot(int64_t stage, int64_t microbatch) { return slots_[{stage, microbatch}]; }

  /// What the first stage knows of the batch: a hash of its inputs' shapes, one of the rule by which it was
  /// split, and the samples of each micro-batch.
  std::vector<int64_t> heading() const {
    std::string inputs;
    for (const Tensors& each : batch_.inputs) inputs += list(metas_of(each)) + ";";
    std::vector<int64_t> result{hash_of(inputs), batch_.input_rule.empty() ? 0 : hash_of(batch_.input_rule),
                                0};
    result.insert(result.end(), batch_.samples.begin(), batch_.samples.end());
    return result;
  }

  /// Which parameters of the stages require gradients: what stages pass on may, then.
  std::string trained() const {
    std::string result;
    for (const PipelineStage& stage : state_.stages) {
      for (const at::Tensor& each : stage.parameters()) result += each.requires_grad() ? '1' : '0';
    }
    return result;
  }

  void check_arguments() const {
    if (batch_.refusal) std::rethrow_exception(batch_.refusal);
    const auto count = static_cast<size_t>(state_.table.microbatches);
    TESSERA_CHECK(state_.failure.empty(),
                  "This pipeline failed in an earlier step, and its world with it: ", state_.failure);
    if (state_.has_first()) {
      TESSERA_CHECK_VALUE(batch_.inputs.size() == count && batch_.samples.size() == count, "a pipeline of ",
                          count,
                          " micro-batches needs the inputs of each on the rank of its first stage, got ",
                          batch_.inputs.size(), ".");
    }
    if (trains() && state_.has_last()) {
      TESSERA_CHECK_VALUE(batch_.loss,
                          "a pipeline trains with a loss: give loss_fn to the schedule and a target to "
                          "the step, on the rank of the last stage. To compute outputs only, call eval().");
    }
  }

  void perform(const PipelineAction& action) {
    const auto& [kind, stage, microbatch] = action;
    switch (kind) {
      case Kind::forward:
        return forward(stage, microbatch);
      case Kind::backward:
        return backward(stage, microbatch);
      case Kind::send_forward:
        return send_outputs(stage, microbatch);
      case Kind::recv_forward:
        return expect_inputs(stage, microbatch);
      case Kind::send_backward:
        return send(state_.rank_of(stage - 1), std::exchange(slot(stage, microbatch).input_gradients, {}));
      case Kind::recv_backward:
        return expect_gradients(stage, microbatch);
    }
  }

  // ---- computing

  void forward(int64_t stage, int64_t microbatch) {
    Slot& here = slot(stage, microbatch);
    Tensors inputs = take_inputs(stage, microbatch);
    const at::AutoGradMode grad_mode(trains());
    Tensors outputs = state_.stage(stage).forward(inputs, microbatch);
    if (trains() && stage > 0) here.inputs = std::move(inputs);
    if (is_last(stage)) return finish_forward(here, outputs, microbatch);
    TensorMetas metas = metas_of(outputs);
    remember_outputs(stage, microbatch, metas);
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (metas[i].requires_grad) here.roots.push_back(torch::autograd::impl::gradient_edge(outputs[i]));
      here.outputs.push_back(outputs[i].detach());
    }
  }

  /// Those that were given, that the stage before has left here, or that were sent.
  Tensors take_inputs(int64_t stage, int64_t microbatch) {
    if (stage == 0) return batch_.inputs[microbatch];
    Tensors inputs;
    if (state_.has_stage(stage - 1)) {
      inputs = std::exchange(slot(stage - 1, microbatch).outputs, {});
      const TensorMetas& metas = state_.outputs.at({stage - 1, microbatch});
      for (size_t i = 0; i < inputs.size(); ++i) inputs[i].requires_grad_(metas[i].requires_grad);
      return inputs;
    }
    const TensorMetas& metas = state_.inputs.at({stage, microbatch});
    inputs = arrived(stage, microbatch);
    for (size_t i = 0; i < inputs.size(); ++i) inputs[i].requires_grad_(metas[i].requires_grad);
    return inputs;
  }

  /// Stages that expect something else would receive garbage.
  void remember_outputs(int64_t stage, int64_t microbatch, const TensorMetas& metas) {
    TensorMetas& known = state_.outputs[{stage, microbatch}];
    TESSERA_CHECK_VALUE(sends_metas_ || known == metas, "Stage ", stage, " of the pipeline returned ",
                        list(metas), " for micro-batch ", microbatch, ", where it returned ", list(known),
                        " before, for inputs of the same shapes. Shapes, dtypes and placements that stages "
                        "pass on may depend "
                        "on those of the inputs only.");
    known = metas;
  }

  void finish_forward(Slot& here, const Tensors& outputs, int64_t microbatch) {
    if (batch_.return_outputs) {
      Tensors& kept = result_.outputs.emplace_back();
      for (const at::Tensor& output : outputs) kept.push_back(output.detach());
    }
    if (!batch_.loss) return;
    const at::Tensor loss = batch_.loss(outputs, microbatch);
    TESSERA_CHECK_VALUE(loss.defined() && loss.numel() == 1,
                        "The loss of a micro-batch must be one number, not ",
                        loss.defined() ? c10::str("a tensor of shape ", loss.sizes()) : "undefined", ".");
    const at::Tensor counted = batch_.is_mean ? loss * share(microbatch) : loss;
    result_.losses.push_back(loss.detach());
    result_.loss = result_.loss.defined() ? result_.loss + counted.detach() : counted.detach();
    if (!trains()) return;
    TESSERA_CHECK_VALUE(counted.requires_grad(), "The loss of micro-batch ", microbatch,
                        " does not depend on any parameter or input that requires a gradient.");
    here.roots = {torch::autograd::impl::gradient_edge(counted)};
    here.root_gradients = {at::ones_like(counted.detach())};
  }

  /// Of the samples of the batch.
  double share(int64_t microbatch) const {
    const auto all = std::accumulate(samples_.begin(), samples_.end(), int64_t{0});
    return static_cast<double>(samples_[microbatch]) / static_cast<double>(all);
  }

  void backward(int64_t stage, int64_t microbatch) {
    Slot& here = slot(stage, microbatch);
    Tensors gradients = take_root_gradients(stage, microbatch);
    reduce_once_.at(stage).set(state_.last_backward.at(stage) == microbatch);
    const auto roots = std::exchange(here.roots, {});
    if (!roots.empty())
      torch::autograd::Engine::get_default_engine().execute(roots, gradients, /*keep_graph=*/false,
                                                            /*create_graph=*/false, /*accumulate_grad=*/true);
    const at::NoGradGuard no_grad;
    for (at::Tensor& input : std::exchange(here.inputs, {})) {
      if (input.requires_grad()) here.input_gradients.push_back(gradient_of(input));
    }
  }

  Tensors take_root_gradients(int64_t stage, int64_t microbatch) {
    if (is_last(stage)) return std::exchange(slot(stage, microbatch).root_gradients, {});
    if (state_.has_stage(stage + 1)) return std::exchange(slot(stage + 1, microbatch).input_gradients, {});
    return arrived(stage, microbatch);
  }

  static at::Tensor gradient_of(at::Tensor& input) {
    at::Tensor gradient = std::exchange(input.mutable_grad(), {});
    if (!gradient.defined()) gradient = at::zeros_like(input);
    if (!DTensor::is_dtensor(input)) return gradient;
    return DTensor(input).coerce_gradient(gradient);
  }

  // ---- messages. Receives are posted where the table has them, and awaited where their values are needed.

  void send_outputs(int64_t stage, int64_t microbatch) {
    Tensors outputs = std::exchange(slot(stage, microbatch).outputs, {});
    const int64_t peer = state_.rank_of(stage + 1);
    if (!sends_metas_) return send(peer, std::move(outputs));
    const at::Tensor text =
        as_bytes(to_bytes(state_.outputs.at({stage, microbatch}), state_.mesh, stage), device());
    outputs.insert(outputs.begin(), {at::scalar_tensor(text.numel(), at::kLong).to(device()), text});
    send(peer, std::move(outputs));
  }

  /// Waits for the messages before, which the table lets arrive before these.
  void send(int64_t peer, Tensors tensors) {
    Sends& sends = sends_[peer];
    finish(sends);
    for (const at::Tensor& tensor : tensors) {
      const at::Tensor local = local_of(tensor);
      if (local.numel() > 0) sends.push_back({comm::send(local, peer, state_.group), local});
    }
  }

  static void finish(Sends& sends) {
    for (Sent& sent : sends) sent.pending.wait();
    sends.clear();
  }

  void expect_inputs(int64_t stage, int64_t microbatch) {
    const int64_t peer = state_.rank_of(stage - 1);
    TensorMetas& metas = state_.inputs[{stage, microbatch}];
    if (sends_metas_) {
      const at::Tensor size = at::empty({}, at::TensorOptions(at::kLong).device(device()));
      comm::recv(size, peer, state_.group).wait();
      const at::Tensor text =
          at::empty({size.item<int64_t>()}, at::TensorOptions(at::kByte).device(device()));
      comm::recv(text, peer, state_.group).wait();
      const at::Tensor bytes = text.cpu();
      metas = from_bytes({static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()}, state_.mesh);
    }
    expect(stage, microbatch, metas, peer);
  }

  void expect_gradients(int64_t stage, int64_t microbatch) {
    TensorMetas metas;
    for (const TensorMeta& output : state_.outputs.at({stage, microbatch})) {
      if (output.requires_grad) metas.push_back(output.of_gradient());
    }
    expect(stage, microbatch, metas, state_.rank_of(stage + 1));
  }

  void expect(int64_t stage, int64_t microbatch, const TensorMetas& metas, int64_t peer) {
    for (const TensorMeta& meta : metas) {
      Arrival arrival{meta, meta.empty_local(device()), std::nullopt};
      if (arrival.local.numel() > 0) arrival.pending = comm::recv(arrival.local, peer, state_.group);
      slot(stage, microbatch).arrivals.push_back(std::move(arrival));
    }
  }

  Tensors arrived(int64_t stage, int64_t microbatch) {
    Tensors tensors;
    for (Arrival& arrival : std::exchange(slot(stage, microbatch).arrivals, {})) {
      if (arrival.pending) arrival.pending->wait();
      tensors.push_back(arrival.meta.wrap(arrival.local));
    }
    return tensors;
  }

  State& state_;
  const PipelineBatch& batch_;
  std::map<int64_t, ReduceOnce> reduce_once_;
  std::map<State::Key, Slot> slots_;
  std::map<int64_t, Sends> sends_;  // by receiver
  std::vector<int64_t> samples_;
  int64_t inputs_hash_ = 0, rule_ = 0;
  std::string trained_;
  bool sends_metas_ = true;  // whether stages send the next one the metas of what they send
  PipelineResult result_;
};

PipelineRunner::PipelineRunner(std::vector<PipelineStage> stages, PipelineTable table)
    : state_(std::make_unique<State>(std::move(stages), std::move(table))) {}
PipelineRunner::PipelineRunner(PipelineRunner&&) noexcept = default;
PipelineRunner& PipelineRunner::operator=(PipelineRunner&&) noexcept = default;
PipelineRunner::~PipelineRunner() = default;

const PipelineTable& PipelineRunner::table() const { return state_->table; }
bool PipelineRunner::has_first() const { return state_->has_first(); }
bool PipelineRunner::has_last() const { return state_->has_last(); }

PipelineResult PipelineRunner::run(const PipelineBatch& batch) {
  Step step(*state_, batch);
  step.begin();
  const uint64_t before = comm::Agreement::shared_errors();
  try {
    return step.run();
  } catch (...) {
    state_->failure = comm::message_of(std::current_exception());
    if (state_->group && comm::Agreement::shared_errors() == before)
      state_->mesh.world()->report_failure(state_->failure);
    throw;
  }
}

}  // namespace tessera
