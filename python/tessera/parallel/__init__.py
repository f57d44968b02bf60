"""Train a model in parallel: what ``torch.distributed.tensor.parallel`` has, on Tessera's tensors, and data parallelism.

    from tessera.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

The model's code stays as it is: hooks on its submodules make distributed tensors of what goes in, and local ones of what comes out.
"""

from tessera.parallel.api import parallelize_module
from tessera.parallel.context import ContextParallel, context_parallel, from_zigzag, to_zigzag, zigzag_order
from tessera.parallel.experts import ExpertParallel, all_to_all_single, exchange_sizes
from tessera.parallel.fully_shard import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from tessera.parallel.input_reshard import input_reshard
from tessera.parallel.loss import loss_parallel
from tessera.parallel.pretrained import from_pretrained, save_pretrained
from tessera.parallel.replicate import ReplicatedModule, replicate
from tessera.parallel.style import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = [
    "CPUOffloadPolicy",
    "ColwiseParallel",
    "ContextParallel",
    "ExpertParallel",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "ReplicatedModule",
    "RowwiseParallel",
    "SequenceParallel",
    "UnshardHandle",
    "all_to_all_single",
    "context_parallel",
    "exchange_sizes",
    "from_pretrained",
    "from_zigzag",
    "fully_shard",
    "input_reshard",
    "loss_parallel",
    "parallelize_module",
    "register_fsdp_forward_method",
    "replicate",
    "save_pretrained",
    "share_comm_ctx",
    "to_zigzag",
    "zigzag_order",
]
