#pragma once

#include <tessera/export.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/placement/text.h>
#include <tessera/redistribute/cost.h>

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera {

/// What memory of a rank is for.
enum class MemoryUse {
  parameters,   ///< and buffers
  gradients,    ///< of parameters
  optimizer,    ///< its states
  activations,  ///< what forward keeps for backward, and everything for a while
  in_flight,    ///< gathered parameters, and messages
};

/// The most bytes that a rank has at a time, for each use, and for all of them together, which may be less than the sum.
struct MemoryOfRank {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t optimizer = 0;
  int64_t activations = 0;
  int64_t in_flight = 0;
  int64_t peak = 0;
};

/// Equal collectives of a step.
struct CollectivesOfStep {
  std::string name;           // "all_reduce", ...
  std::string mesh_dims;      // "tp", or "dp_tp" for several
  bool is_agreement = false;  // ranks only compare what they found: none of the user's data moves
  int64_t ranks = 0;          // in the group
  int64_t calls = 0;
  int64_t bytes = 0;   // what this rank gives or gets, whichever is more
  double seconds = 0;  // by the cost model
};

/// What a step costs one rank.
struct StepCost {
  std::string mesh;  // "mesh(dp=64, tp=8)"
  int64_t rank = 0;
  MemoryOfRank memory;
  std::vector<CollectivesOfStep> collectives;  // by mesh dims and name
  double flops = 0;                            // of products of matrices, and attention

  TESSERA_API int64_t bytes() const;
  TESSERA_API double communication_seconds() const;
};

/// A table of it: memory, collectives, time.
TESSERA_API std::ostream& operator<<(std::ostream& out, const StepCost& cost);

struct DryRunOptions {
  /// Which of the ranks the calling thread is.
  int64_t rank = 0;
  /// Latency and bandwidth of each mesh dim.
  CostModel cost = {};
};

/// While alive, the calling thread is one rank of a mesh whose other ranks do not exist, and what it does with tensors on
/// meta is done as always, by the same rules, plans and collectives, but without values: so a mesh of 100,000 ranks and a
/// model of 100,000,000,000 parameters can be looked at. Memory is counted as tensors come and go, collectives as they
/// are called.
///
///   DryRun run(parse_mesh("dp=512,tp=8"));
///   Transformer model = [] { OnMeta on_meta; return Transformer(options); }();
///   parallelize(model, run.mesh());
///   run.begin_step(model->parameters());
///   train_one_step(model, batch_on_meta);
///   std::cout << run.end_step(model->parameters());
///
/// The values of tensors on meta cannot be asked for: a model whose shapes depend on them cannot be run so.
class TESSERA_API DryRun {
 public:
  explicit DryRun(const Layout& mesh, const DryRunOptions& options = {});
  ~DryRun();
  DryRun(const DryRun&) = delete;
  DryRun& operator=(const DryRun&) = delete;

  const DeviceMesh& mesh() const;

  /// What the calling thread allocates from now on is for this: parameters at first, activations after begin_step. Gradients
  /// and what is in flight are known for what they are.
  void set_use(MemoryUse use);

  /// Counts from here on. `parameters`: of the model, and its buffers.
  void begin_step(const std::vector<at::Tensor>& parameters);
  StepCost end_step(const std::vector<at::Tensor>& parameters);

 private:
  class Recorder;
  std::unique_ptr<Recorder> recorder_;
};

/// A model that is distributed on a mesh, and how one step of training is made.
struct TrainingStep {
  std::vector<at::Tensor> parameters;  ///< and buffers
  std::function<at::Tensor()> loss;    ///< forward
  std::function<void()> update = {};   ///< the optimizer's step
  std::shared_ptr<void> model = {};    ///< kept as long as it is needed
};

/// What a step of training costs one rank of a mesh, by a dry run: `make` makes the model on meta and distributes it on the
/// mesh that it is given. The second step is counted: the first makes the optimizer's states.
TESSERA_API StepCost plan_model(const Layout& mesh,
                                const std::function<TrainingStep(const DeviceMesh&)>& make,
                                const DryRunOptions& options = {});

}  // namespace tessera
