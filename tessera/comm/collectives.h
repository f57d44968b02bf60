#pragma once

#include <tessera/comm/world.h>
#include <tessera/export.h>

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

/// The collectives, the same on every backend: c10d's transports refuse some dtypes, reductions and uneven
/// sizes; here all of them work everywhere. On "threads" and on what a transport can do by itself these add
/// nothing.
///
///   - any dtype can be moved
///   - every dtype has the reductions sum, avg and product; floating and complex ones premul_sum; all but
///     complex ones min and max; integers and bool band, bor and bxor
///   - parts may differ in size from rank to rank and be empty; sizes count elements, shapes are free
///   - tensors need not be contiguous; results are written in place; autograd is not involved
///   - if a peer failed, the error says which and why, where that is known
namespace tessera::comm {

/// A collective under way. Its tensors must not be touched until `wait` has returned.
class TESSERA_API Pending {
 public:
  /// `finish` is what remains to be done with the results, on the waiting thread.
  Pending(Group group, c10::intrusive_ptr<c10d::Work> work, std::function<void()> finish = {});
  Pending(Pending&&) noexcept;
  Pending& operator=(Pending&&) noexcept;
  ~Pending();

  /// Returns when the collective is done, throws if it failed. Later calls do nothing.
  void wait();

 private:
  /// Nobody will wait for it: the rank is not in that call any more.
  void forget() noexcept;

  Group group_;
  c10::intrusive_ptr<c10d::Work> work_;
  std::function<void()> finish_;
  std::shared_ptr<ProcessRank> rank_;  // null on ranks that are threads
  std::vector<int64_t> members_;
  uint64_t call_ = 0;  // in its record
};

using Tensors = std::vector<at::Tensor>;

/// tensor = op over the ranks' tensors.
[[nodiscard]] TESSERA_API Pending all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op,
                                             const Group& group);
/// outputs[r] = rank r's input.
[[nodiscard]] TESSERA_API Pending all_gather(const Tensors& outputs, const at::Tensor& input,
                                             const Group& group);
/// The same into one tensor, one after the other; all inputs have the same size.
[[nodiscard]] TESSERA_API Pending all_gather_into(const at::Tensor& output, const at::Tensor& input,
                                                  const Group& group);
/// output = op over the ranks' inputs[this rank].
[[nodiscard]] TESSERA_API Pending reduce_scatter(const at::Tensor& output, const Tensors& inputs,
                                                 const c10d::ReduceOp& op, const Group& group);
/// The same from one tensor that holds all inputs one after the other; all outputs have the same size.
[[nodiscard]] TESSERA_API Pending reduce_scatter_from(const at::Tensor& output, const at::Tensor& input,
                                                      const c10d::ReduceOp& op, const Group& group);
/// Whether the group moves several tensors at once as they lie in memory (threads, shared memory): then there are the calls
/// below. Elsewhere they would have to be packed into one message.
TESSERA_API bool moves_lists(const Group& group);
/// all_gather_into of each outputs[i] and inputs[i].
[[nodiscard]] TESSERA_API Pending all_gather_into(const Tensors& outputs, const Tensors& inputs,
                                                  const Group& group);
/// reduce_scatter_from of each outputs[i] and inputs[i].
[[nodiscard]] TESSERA_API Pending reduce_scatter_from(const Tensors& outputs, const Tensors& inputs,
                                                      const c10d::ReduceOp& op, const Group& group);
/// outputs[r] = rank r's inputs[this rank].
[[nodiscard]] TESSERA_API Pending all_to_all(const Tensors& outputs, const Tensors& inputs,
                                             const Group& group);
/// tensor = root's tensor.
[[nodiscard]] TESSERA_API Pending broadcast(const at::Tensor& tensor, int64_t root, const Group& group);
/// On the root alone: tensor = op over the ranks' tensors. The others' tensors keep their values.
[[nodiscard]] TESSERA_API Pending reduce(const at::Tensor& tensor, const c10d::ReduceOp& op, int64_t root,
                                         const Group& group);
/// On the root: outputs[r] = rank r's input. On the others `outputs` is empty.
[[nodiscard]] TESSERA_API Pending gather(const Tensors& outputs, const at::Tensor& input, int64_t root,
                                         const Group& group);
/// output = root's inputs[this rank]. On the others `inputs` is empty.
[[nodiscard]] TESSERA_API Pending scatter(const at::Tensor& output, const Tensors& inputs, int64_t root,
                                          const Group& group);
/// Returns (from wait) when all ranks have called it.
[[nodiscard]] TESSERA_API Pending barrier(const Group& group);
[[nodiscard]] TESSERA_API Pending send(const at::Tensor& tensor, int64_t to, const Group& group, int tag = 0);
[[nodiscard]] TESSERA_API Pending recv(const at::Tensor& tensor, int64_t from, const Group& group,
                                       int tag = 0);

}  // namespace tessera::comm
