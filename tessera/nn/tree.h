#pragma once

#include <tessera/export.h>
#include <tessera/thread_scope.h>

#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

namespace torch::nn {
class Module;
}

namespace tessera {

using NamedTensors = torch::OrderedDict<std::string, at::Tensor>;

/// The lists of a module itself, without its submodules'.
NamedTensors& parameters_of(torch::nn::Module& module);
NamedTensors& buffers_of(torch::nn::Module& module);

/// Names, dtypes and sizes of all parameters and buffers: "fc.weight Float[4, 4], fc.bias Float[4]".
std::string tensors_text(const torch::nn::Module& module);

/// A module and its submodules, with every handle on their parameters and buffers. While it lives, the
/// modules must not be changed but through it.
class Tree {
 public:
  explicit Tree(torch::nn::Module& root);
  ~Tree();
  Tree(const Tree&) = delete;
  Tree& operator=(const Tree&) = delete;

  /// The tree of the calling thread that `module` is in: the innermost one alive, or null.
  static Tree* around(const torch::nn::Module& module);

  /// Makes all handles on `handle`'s tensor handles on `now`, whatever modules share it. Returns whether that
  /// was all of them: whoever else has one goes on with the old tensor. If it was not, and if `only_if_all`,
  /// nothing has changed.
  bool replace(at::Tensor& handle, const at::Tensor& now, bool only_if_all);

  /// The dotted name of a module in the tree; that of the root is empty.
  std::string name_of(const torch::nn::Module& module) const;

 private:
  void add(torch::nn::Module& module, const std::string& name);

  std::unordered_map<const torch::nn::Module*, std::string> names_;
  std::unordered_map<const c10::TensorImpl*, std::vector<at::Tensor*>> handles_;
  ThreadScope<Tree*, Tree> scope_;
};

}  // namespace tessera
