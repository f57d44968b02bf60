#include <tessera/error.h>
#include <tessera/nn/input_reshard.h>
#include <tessera/nn/saved_shard.h>

#include <memory>
#include <optional>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

namespace tessera {

namespace {

class Reshard final : public torch::autograd::SavedVariableHooks {
 public:
  explicit Reshard(const InputReshard& scope) : layout_{scope.mesh(), scope.mesh_dim(), scope.dim()} {}

  void call_pack_hook(const at::Tensor& tensor) override {
    shard_ = SavedShard::of(tensor, layout_);
    if (!shard_) kept_ = tensor;
  }
  at::Tensor call_unpack_hook() override { return shard_ ? shard_->gathered() : kept_; }

 private:
  const SavedShard::Layout layout_;
  std::optional<SavedShard> shard_;
  at::Tensor kept_;  // if not sharded
};

/// libtorch asks its engine what to do with what is saved. This one answers, and leaves all else to the
/// engine that was there.
class Engine final : public torch::autograd::Engine {
 public:
  explicit Engine(torch::autograd::Engine& inner) : inner_(inner) {}

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    const auto* scope = ThreadScope<const InputReshard*, InputReshard>::current();
    if (scope) return std::make_unique<Reshard>(*scope);
    return inner_.get_default_saved_variable_hooks();
  }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return inner_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& task, c10::intrusive_ptr<torch::autograd::Node> root,
      torch::autograd::InputBuffer&& input) override {
    return inner_.execute_with_graph_task(task, std::move(root), std::move(input));
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return inner_.make_anomaly_metadata();
  }
  void thread_on_exception(const std::shared_ptr<torch::autograd::GraphTask>& task,
                           const c10::intrusive_ptr<torch::autograd::Node>& node,
                           std::exception& error) override {
    inner_.thread_on_exception(task, node, error);
  }

 private:
  torch::autograd::Engine& inner_;
};

Engine& engine() {
  static auto& instance = *new Engine(torch::autograd::Engine::get_default_engine());  // used to the very end
  return instance;
}

}  // namespace

InputReshard::InputReshard(const DeviceMesh& mesh, int64_t dim, const std::optional<MeshDim>& mesh_dim)
    : mesh_(mesh), mesh_dim_(mesh_dim ? mesh.dim_index(*mesh_dim) : 0), dim_(dim), scope_(this) {
  TESSERA_CHECK_VALUE(mesh_dim || mesh.ndim() == 1, "InputReshard: ", mesh, " has ", mesh.ndim(),
                      " dims; say which one to use.");
  TESSERA_CHECK_INDEX(dim >= 0, "InputReshard: dim ", dim, " is negative; count from the first.");
  static const bool installed = [] {
    engine();
    torch::autograd::set_default_engine_stub([]() -> torch::autograd::Engine& { return engine(); });
    return true;
  }();
  static_cast<void>(installed);
}

InputReshard::~InputReshard() = default;

}  // namespace tessera
