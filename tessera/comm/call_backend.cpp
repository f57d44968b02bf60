#include <tessera/comm/call_backend.h>
#include <tessera/error.h>

namespace tessera {

using c10d::OpType;
using comm::Collective;

namespace {

const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* what) {
  TESSERA_CHECK_VALUE(tensors.size() == 1, what, ": takes one tensor a rank, got ", tensors.size(), ".");
  return tensors[0];
}

const std::vector<at::Tensor>& only(const std::vector<std::vector<at::Tensor>>& lists, const char* what) {
  TESSERA_CHECK_VALUE(lists.size() == 1, what, ": takes one list of tensors a rank, got ", lists.size(), ".");
  return lists[0];
}

void check_count(const std::vector<at::Tensor>& tensors, int size, const char* what) {
  TESSERA_CHECK_VALUE(static_cast<int>(tensors.size()) == size, what, ": needs one tensor for each of the ",
                      size, " ranks of the group, got ", tensors.size(), ".");
}

void check_root(int64_t root, int size, const char* what) {
  TESSERA_CHECK_VALUE(root >= 0 && root < size, what, ": root ", root, " is not a rank of this group of ",
                      size, ".");
}

}  // namespace

CallBackend::Work CallBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  check_root(opts.rootRank, getSize(), "broadcast");
  comm::CallBuilder call(Collective::broadcast, content());
  call.root(opts.rootRank).in_out(only(tensors, "broadcast"));
  return submit(call, OpType::BROADCAST, tensors, opts.timeout,
                [&](Backend& to) { return to.broadcast(tensors, opts); });
}

CallBackend::Work CallBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  comm::CallBuilder call(Collective::all_reduce, content());
  call.reduction(opts.reduceOp).in_out(only(tensors, "all_reduce"));
  return submit(call, OpType::ALLREDUCE, tensors, opts.timeout,
                [&](Backend& to) { return to.allreduce(tensors, opts); });
}

CallBackend::Work CallBackend::allreduce_coalesced(Tensors& tensors,
                                                   const c10d::AllreduceCoalescedOptions& opts) {
  comm::CallBuilder call(Collective::all_reduce, content());
  call.reduction(opts.reduceOp).in_out(tensors);
  return submit(call, OpType::ALLREDUCE_COALESCED, tensors, opts.timeout,
                [&](Backend& to) { return to.allreduce_coalesced(tensors, opts); });
}

CallBackend::Work CallBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  check_root(opts.rootRank, getSize(), "reduce");
  comm::CallBuilder call(Collective::reduce, content());
  call.root(opts.rootRank).reduction(opts.reduceOp).in_out(only(tensors, "reduce"));
  return submit(call, OpType::REDUCE, tensors, opts.timeout,
                [&](Backend& to) { return to.reduce(tensors, opts); });
}

CallBackend::Work CallBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                         const c10d::AllgatherOptions& opts) {
  check_count(only(outputs, "all_gather"), getSize(), "all_gather");
  comm::CallBuilder call(Collective::all_gather, content());
  call.in(only(inputs, "all_gather")).out(outputs[0]);
  return submit(call, OpType::ALLGATHER, outputs[0], opts.timeout,
                [&](Backend& to) { return to.allgather(outputs, inputs, opts); });
}

CallBackend::Work CallBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::AllgatherOptions& opts) {
  comm::CallBuilder call(Collective::all_gather, content());
  call.joined().in(input).out(output);
  return submit(call, OpType::_ALLGATHER_BASE, {output}, opts.timeout,
                [&](Backend& to) { return to._allgather_base(output, input, opts); });
}

CallBackend::Work CallBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                   const c10d::AllgatherOptions& opts) {
  TESSERA_CHECK_VALUE(static_cast<int>(outputs.size()) == getSize(),
                      "all_gather: needs a list of outputs for each of the ", getSize(),
                      " ranks of the group, got ", outputs.size(), ".");
  comm::CallBuilder call(Collective::all_gather, content());
  call.in(inputs);
  Tensors results;
  for (size_t i = 0; i < inputs.size(); ++i) {
    for (const Tensors& from_rank : outputs) {
      TESSERA_CHECK_VALUE(from_rank.size() == inputs.size(), "all_gather: there are ", inputs.size(),
                          " inputs, but a list of ", from_rank.size(), " outputs.");
      call.out(from_rank[i]);
      results.push_back(from_rank[i]);
    }
  }
  return submit(call, OpType::ALLGATHER_COALESCED, std::move(results), opts.timeout,
                [&](Backend& to) { return to.allgather_coalesced(outputs, inputs, opts); });
}

CallBackend::Work CallBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                               const c10d::AllgatherOptions& opts) {
  TESSERA_CHECK_VALUE(outputs.size() == inputs.size(), "all_gather: there are ", inputs.size(),
                      " inputs, but ", outputs.size(), " outputs.");
  comm::CallBuilder call(Collective::all_gather, content());
  call.joined().in(inputs).out(outputs);
  return submit(call, OpType::ALLGATHER_COALESCED, outputs, opts.timeout,
                [&](Backend& to) { return to.allgather_into_tensor_coalesced(outputs, inputs, opts); });
}

CallBackend::Work CallBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                      const c10d::GatherOptions& opts) {
  check_root(opts.rootRank, getSize(), "gather");
  comm::CallBuilder call(Collective::gather, content());
  call.root(opts.rootRank).in(only(inputs, "gather"));
  if (getRank() != opts.rootRank)
    return submit(call, OpType::GATHER, {}, opts.timeout,
                  [&](Backend& to) { return to.gather(outputs, inputs, opts); });
  check_count(only(outputs, "gather"), getSize(), "gather");
  call.out(outputs[0]);
  return submit(call, OpType::GATHER, outputs[0], opts.timeout,
                [&](Backend& to) { return to.gather(outputs, inputs, opts); });
}

CallBackend::Work CallBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                       const c10d::ScatterOptions& opts) {
  check_root(opts.rootRank, getSize(), "scatter");
  comm::CallBuilder call(Collective::scatter, content());
  call.root(opts.rootRank).out(only(outputs, "scatter"));
  if (getRank() == opts.rootRank) {
    check_count(only(inputs, "scatter"), getSize(), "scatter");
    call.in(inputs[0]);
  }
  return submit(call, OpType::SCATTER, outputs, opts.timeout,
                [&](Backend& to) { return to.scatter(outputs, inputs, opts); });
}

CallBackend::Work CallBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                              const c10d::ReduceScatterOptions& opts) {
  check_count(only(inputs, "reduce_scatter"), getSize(), "reduce_scatter");
  comm::CallBuilder call(Collective::reduce_scatter, content());
  call.reduction(opts.reduceOp).in(inputs[0]).out(only(outputs, "reduce_scatter"));
  return submit(call, OpType::REDUCE_SCATTER, outputs, opts.timeout,
                [&](Backend& to) { return to.reduce_scatter(outputs, inputs, opts); });
}

CallBackend::Work CallBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                    const c10d::ReduceScatterOptions& opts) {
  comm::CallBuilder call(Collective::reduce_scatter, content());
  call.reduction(opts.reduceOp).joined().in(input).out(output);
  return submit(call, OpType::_REDUCE_SCATTER_BASE, {output}, opts.timeout,
                [&](Backend& to) { return to._reduce_scatter_base(output, input, opts); });
}

CallBackend::Work CallBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                               const c10d::ReduceScatterOptions& opts) {
  TESSERA_CHECK_VALUE(outputs.size() == inputs.size(), "reduce_scatter: there are ", inputs.size(),
                      " inputs, but ", outputs.size(), " outputs.");
  comm::CallBuilder call(Collective::reduce_scatter, content());
  call.reduction(opts.reduceOp).joined().in(inputs).out(outputs);
  return submit(call, OpType::REDUCE_SCATTER_TENSOR_COALESCED, outputs, opts.timeout,
                [&](Backend& to) { return to.reduce_scatter_tensor_coalesced(outputs, inputs, opts); });
}

CallBackend::Work CallBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                             std::vector<int64_t>& output_splits,
                                             std::vector<int64_t>& input_splits,
                                             const c10d::AllToAllOptions& opts) {
  comm::CallBuilder call(Collective::all_to_all, content());
  call.in_parts(input, input_splits, getSize()).out_parts(output, output_splits, getSize());
  return submit(call, OpType::ALLTOALL_BASE, {output}, opts.timeout, [&](Backend& to) {
    return to.alltoall_base(output, input, output_splits, input_splits, opts);
  });
}

CallBackend::Work CallBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                        const c10d::AllToAllOptions& opts) {
  check_count(outputs, getSize(), "all_to_all");
  check_count(inputs, getSize(), "all_to_all");
  comm::CallBuilder call(Collective::all_to_all, content());
  call.in(inputs).out(outputs);
  return submit(call, OpType::ALLTOALL, outputs, opts.timeout,
                [&](Backend& to) { return to.alltoall(outputs, inputs, opts); });
}

CallBackend::Work CallBackend::barrier(const c10d::BarrierOptions& opts) {
  comm::CallBuilder call(Collective::barrier, content());
  return submit(call, OpType::BARRIER, {}, opts.timeout, [&](Backend& to) { return to.barrier(opts); });
}

}  // namespace tessera
