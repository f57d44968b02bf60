"""Sharded tensors: torch.distributed._shard's names, on threads and on processes, against one device."""

import copy
import io
import pathlib
import pickle
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks, values
from tessera.sharded.sharding_spec.api import _CUSTOM_SHARDING_SPEC_OPS, custom_sharding_spec_op
from test_processes import launch
from torch.distributed import _remote_device

import tessera
from tessera import Replicate, checkpoint, sharded
from tessera.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    Shard,
    ShardedOptimizer,
    ShardedTensor,
    ShardedTensorBase,
    ShardedTensorMetadata,
    Sharder,
    ShardingPlan,
    ShardingPlanner,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
    _shard_tensor,
    custom_sharded_op_impl,
    init_from_local_shards,
    load_with_process_group,
    named_params_with_sharded_tensor,
    pre_load_state_dict_hook,
    shard_module,
    shard_parameter,
    sharded_tensor,
    state_dict_hook,
)

WORKER = pathlib.Path(__file__).with_name("sharded_worker.py")


def chunks(dim, *ranks):
    return ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])


def grid():
    """Of a [6, 4]: two shards on rank 0, none on rank 2."""
    return EnumerableShardingSpec(
        [
            ShardMetadata([0, 0], [2, 4], "rank:0/cpu"),
            ShardMetadata([2, 0], [4, 1], "rank:1/cpu"),
            ShardMetadata([2, 1], [3, 3], "rank:3/cpu"),
            ShardMetadata([5, 1], [1, 3], "rank:0/cpu"),
        ]
    )


SPECS = [chunks(0, 0, 1, 2, 3), chunks(1, 3, 1), chunks(-2, 2, 0, 2, 1, 3), grid()]


def part(full, metadata):
    for dim, (offset, size) in enumerate(zip(metadata.shard_offsets, metadata.shard_sizes)):
        full = full.narrow(dim, offset, size)
    return full


def assert_sharded(tensor, expected, **tolerance):
    """It is a sharded tensor of that value."""
    assert type(tensor) is ShardedTensor and tensor.shape == expected.shape
    for shard in tensor.local_shards():
        torch.testing.assert_close(shard.tensor, part(expected, shard.metadata), **tolerance)


def loss_of(tensor, function=torch.square):
    """The sum over this rank's shards, or over none."""
    return sum((function(local).sum() for local in tensor.local_tensors()), torch.zeros(()))


# --- values


def test_metadata_are_values():
    shard = ShardMetadata([0, 2], [3, 4], "rank:1/cpu")
    assert shard.placement == _remote_device("rank:1/cpu")
    assert shard == ShardMetadata([0, 2], [3, 4], "rank:1/cpu") != ShardMetadata([0, 2], [3, 5], "rank:1/cpu")
    assert hash(shard) == hash(copy.deepcopy(shard)) and pickle.loads(pickle.dumps(shard)) == shard
    shard.shard_offsets[0] = 1
    assert shard.shard_offsets == [1, 2]
    with pytest.raises(ValueError, match="as many"):
        ShardMetadata([0], [1, 2])
    with pytest.raises(ValueError, match="0 or more"):
        ShardMetadata([-1], [1])
    for memory_format in (torch.contiguous_format, torch.channels_last, torch.preserve_format):
        metadata = ShardedTensorMetadata(
            [shard],
            torch.Size([4, 6]),
            TensorProperties(torch.half, memory_format=memory_format, pin_memory=True),
        )
        assert pickle.loads(pickle.dumps(metadata)) == metadata == copy.deepcopy(metadata)


def test_specs():
    spec = chunks(0, 0, 1, 2, 3)
    metadata = spec.build_metadata(torch.Size([10, 4]), TensorProperties())
    assert [each.shard_sizes[0] for each in metadata.shards_metadata] == [3, 3, 3, 1]
    assert sharded.sharding_spec._infer_sharding_spec_from_shards_metadata(metadata.shards_metadata) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec == copy.deepcopy(spec) != chunks(1, 0, 1, 2, 3)
    assert pickle.loads(pickle.dumps(grid())) == grid()
    with pytest.raises(NotImplementedError, match="position"):
        ChunkShardingSpec("rows", ["rank:0/cpu"])
    with pytest.raises(ValueError, match="no dim 2"):
        chunks(2, 0).build_metadata(torch.Size([10, 4]), TensorProperties())
    with pytest.raises(ValueError, match="overlap"):
        EnumerableShardingSpec([ShardMetadata([0], [2], "rank:0"), ShardMetadata([1], [2], "rank:1")])
    with pytest.raises(ValueError, match="at least one"):
        EnumerableShardingSpec([])
    with pytest.raises(ValueError, match="none has element"):
        grid().build_metadata(torch.Size([7, 4]), TensorProperties())
    with pytest.raises(ValueError, match="size"):
        Shard(torch.zeros(2), ShardMetadata([0], [3]))


def test_without_ranks():
    """What torch.distributed.checkpoint makes: a description, with shards of any rank."""
    metadata = chunks(0, 0, 1).build_metadata(torch.Size([4, 2]), TensorProperties())
    shards = [Shard(torch.ones(2, 2), each) for each in metadata.shards_metadata]
    tensor = ShardedTensorBase._init_from_local_shards_and_global_metadata(shards, metadata)
    assert tensor.shape == (4, 2) and tensor.local_shards() == shards and tensor.metadata() is metadata
    assert tensor.sharding_spec() == chunks(0, 0, 1)
    with pytest.raises(RuntimeError, match="no ranks"):
        sharded_tensor.empty(chunks(0, 0), 4)


# --- making


@on_ranks()
def test_factories():
    for spec in SPECS:
        for name, value in (("ones", 1.0), ("zeros", 0.0)):
            made = getattr(sharded_tensor, name)(spec, 6, 4, dtype=torch.float64, requires_grad=True)
            assert_sharded(made, torch.full((6, 4), value, dtype=torch.float64, requires_grad=True))
            assert made.requires_grad and made.is_leaf and isinstance(made, torch.Tensor)
        assert_sharded(sharded_tensor.full(spec, (6, 4), 2.5), torch.full((6, 4), 2.5))
        assert_sharded(sharded_tensor.full(spec, [6, 4], 7, dtype=torch.int32), torch.full((6, 4), 7).int())
        assert sharded_tensor.empty(spec, [6, 4]).metadata().size == torch.Size([6, 4])
        assert ShardedTensor(spec, 6, 4, dtype=torch.bool).dtype == torch.bool
        assert sharded_tensor.empty(spec, 6, 4).sharding_spec() == spec
    with pytest.raises(ValueError, match="strided"):
        sharded_tensor.empty(chunks(0, 0), 4, layout=torch.sparse_coo)
    with pytest.raises(ValueError, match="contiguous"):
        sharded_tensor.empty(chunks(0, 0), 4, memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="rank 9"):
        sharded_tensor.empty(chunks(0, 9), 4)
    with pytest.raises(TypeError):
        sharded_tensor.empty(chunks(0, 0), "four")
    with pytest.raises(ValueError, match="ShardingSpec"):
        sharded_tensor.empty("chunks", 4)


@on_ranks()
def test_random_numbers_do_not_depend_on_the_spec():
    made = []
    for spec in SPECS:
        tessera.manual_seed(3)
        made.append((sharded_tensor.rand(spec, 6, 4), sharded_tensor.randn(spec, 6, 4)))
    for uniform, normal in made[1:]:
        for a, b in ((uniform, made[0][0]), (normal, made[0][1])):
            full = a.gather(0)
            expected = b.gather(0)
            assert (full is None) == (tessera.get_rank() != 0)
            assert full is None or torch.equal(full, expected)


@on_ranks()
def test_from_local_shards():
    rank, full = tessera.get_rank(), values(8, 3)
    local = full[2 * rank : 2 * rank + 2].clone()
    made = init_from_local_shards([Shard.from_tensor_and_offsets(local, [2 * rank, 0], rank)], 8, 3)
    assert_sharded(made, full)
    assert made.local_tensor() is local and made.sharding_spec() == chunks(0, 0, 1, 2, 3)
    unknown = init_from_local_shards([Shard.from_tensor_and_offsets(local, [0, 0], rank)], None, 3)
    assert_sharded(unknown, full)
    assert_sharded(ShardedTensor._init_from_local_tensor(local, chunks(0, 0, 1, 2, 3), [8, 3]), full)
    metadata = made.metadata()
    again = ShardedTensor._init_from_local_shards_and_global_metadata(made.local_shards(), metadata)
    assert again.local_tensor() is local and torch.equal(again, made)
    assert made.metadata() is metadata
    # What is wrong on one rank is an error on all.
    wrong = [Shard.from_tensor_and_offsets(local, [2 * rank - (rank == 2), 0], rank)]
    with pytest.raises(ValueError, match="overlap"):
        init_from_local_shards(wrong, 8, 3)
    with pytest.raises(ValueError, match="dtype"):
        init_from_local_shards(
            [
                Shard.from_tensor_and_offsets(
                    local.to(torch.float32 if rank else torch.float64), [2 * rank, 0], rank
                )
            ],
            8,
            3,
        )


@on_ranks()
def test_sub_groups():
    rank, full = tessera.get_rank(), values(6, 4)
    made = sharded_tensor.ones(chunks(0, 3, 1), 6, 4, process_group=[1, 3])
    assert len(made.local_shards()) == (rank in (1, 3))
    mesh = tessera.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = mesh.get_group("tp")
    mine = (0, 1) if rank < 2 else (2, 3)
    made = _shard_tensor(full, chunks(1, *mine), process_group=group)
    assert_sharded(made, full)
    assert made._process_group is group
    gathered = made.gather(1)
    assert (gathered is None) == (rank % 2 == 0) and (gathered is None or torch.equal(gathered, full))


# --- local shards


@on_ranks()
def test_local_shards_are_the_tensors_own():
    rank = tessera.get_rank()
    made = sharded_tensor.ones(chunks(0, 0, 1, 2, 3), 8, 2)
    (shard,) = made.local_shards()
    shard.tensor.fill_(rank)
    assert torch.equal(made.local_tensor(), torch.full((2, 2), float(rank)))
    other = torch.full((2, 2), 9.0).requires_grad_()
    shard.tensor = other
    assert made.local_tensor() is other is shard.tensor and made.requires_grad
    copied = copy.deepcopy(made.local_shards())
    assert type(copied[0]) is Shard and copied[0].metadata == shard.metadata
    assert copied[0].tensor is not other and torch.equal(copied[0].tensor, other)
    with pytest.raises(ValueError, match="Int"):
        shard.tensor = torch.ones(2, 2, dtype=torch.int32)
    several = sharded_tensor.ones(chunks(0, 0, 1, 0), 6, 2)
    if rank in (0, 2):
        with pytest.raises(NotImplementedError, match="local_shards"):
            several.local_tensor()
    assert "rank:1/cpu" in repr(made) and hash(made) == hash(made)


@on_ranks()
def test_remote_shards():
    rank, full = tessera.get_rank(), values(6, 4)
    spec = grid()
    metadata = spec.build_metadata(full.shape, TensorProperties())
    mine = [
        Shard(part(full, each).clone(), each)
        for each in metadata.shards_metadata
        if each.placement.rank() == rank
    ]
    made = init_from_local_shards(mine, 6, 4, init_rrefs=True)
    remote = made.remote_shards()
    assert sorted(remote) == [each for each in (0, 1, 3) if each != rank]
    for owner, shards in remote.items():
        for shard in shards:
            here = shard.to_here(timeout=5)
            assert shard.owner().id == owner and shard.metadata == here.metadata
            assert torch.equal(here.tensor, part(full, here.metadata))
    # A handle keeps the shard, as an RRef does.
    handle = remote[3 if rank == 1 else 1][0]
    del made, remote, mine, shards, shard
    tessera._C.meet("all have let go")
    assert torch.equal(handle.to_here().tensor, part(full, handle.metadata))
    with pytest.raises(RuntimeError, match="init_rrefs"):
        sharded_tensor.ones(spec, 6, 4).remote_shards()


# --- moving


@on_ranks()
def test_gather_and_reshard():
    full = values(6, 4)
    for source in SPECS:
        for target in SPECS:
            made = _shard_tensor(full, source)
            new = sharded.reshard(made, target)
            assert_sharded(new, full)
            assert made.sharding_spec() == source
            before = made.metadata()
            assert made.reshard(target) is made and made.sharding_spec() == target
            assert_sharded(made, full)
            assert source == target or made.metadata() != before
        out = torch.zeros(6, 4) if tessera.get_rank() == 2 else None
        made.gather(2, out)
        assert out is None or torch.equal(out, full)
        as_double = made.gather(1, dtype=torch.float64)
        assert (as_double is None) == (tessera.get_rank() != 1)
    with pytest.raises(IndexError):
        made.gather(7)
    if tessera.get_rank() == 3:
        out = torch.zeros(2, 2)
    with pytest.raises(ValueError):  # on all ranks
        made.gather(3, out if tessera.get_rank() == 3 else None)


@on_ranks()
def test_reshard_of_parameters_and_results():
    full = values(6, 4)
    weight = torch.nn.Parameter(_shard_tensor(full, chunks(0, 0, 1, 2, 3)))
    loss_of(weight).backward()
    weight.reshard(grid())
    assert weight.is_leaf and weight.requires_grad and isinstance(weight, torch.nn.Parameter)
    assert_sharded(weight.detach(), full)
    assert_sharded(weight.grad, 2 * full)
    # Differentiable, for what is no leaf, and as a function.
    for moved in (lambda x: x.reshard(grid()), lambda x: sharded.reshard(x, grid())):
        weight = torch.nn.Parameter(_shard_tensor(full, chunks(0, 0, 1, 2, 3)))
        result = moved(weight * 3)
        assert result.requires_grad and not result.is_leaf and result.sharding_spec() == grid()
        loss_of(result).backward()
        assert_sharded(weight.grad, 18 * full)


@on_ranks()
def test_to():
    made = _shard_tensor(values(6, 4), grid())
    assert made.to("cpu") is made and made.cpu() is made and made.to(torch.float32) is made
    for double in (
        made.to(torch.float64),
        made.to("cpu", torch.float64),
        made.to(dtype=torch.float64),
        made.to(torch.ones(1, dtype=torch.float64)),
        made.double(),
        made.type_as(torch.ones(1, dtype=torch.float64)),
    ):
        assert_sharded(double, values(6, 4).double())
        assert double.metadata().tensor_properties.dtype == double.dtype == torch.float64
    assert made.to("cpu", copy=True) is not made
    with pytest.raises(RuntimeError, match="memory format"):
        made.to("cpu", torch.float64, memory_format=torch.channels_last)


# --- operators


@on_ranks()
def test_operators():
    a, b = values(6, 4, seed=1), values(6, 4, seed=2)
    for spec in SPECS:
        x, y = _shard_tensor(a, spec), _shard_tensor(b, spec)
        assert_sharded(x + 2 * y, a + 2 * b)
        assert_sharded(torch.where(x > 0, x, y).exp(), torch.where(a > 0, a, b).exp())
        assert_sharded(x.clone().mul_(y).clamp_(min=0), (a * b).clamp(min=0))
        assert_sharded(torch.zeros_like(x), torch.zeros(6, 4))
        assert_sharded(
            torch.full_like(x, 8.5, dtype=torch.float64), torch.full((6, 4), 8.5, dtype=torch.float64)
        )
        assert torch.equal(x, x.clone()) and not torch.equal(x, y) and torch.allclose(x, x + 1e-9)
        torch.testing.assert_close(x.norm(), a.norm())
        assert x.max() == a.max() and x.min() == a.min()
        assert (x.dim(), x.ndim, x.size(0), x.numel(), x.is_contiguous()) == (2, 2, 6, 24, True)
        assert_sharded(y.copy_(x), a)
        assert_sharded(copy.deepcopy(x), a)
        with torch.no_grad():
            torch.nn.init.constant_(x, 3)
        assert_sharded(x, torch.full((6, 4), 3.0))
    with pytest.raises(RuntimeError, match="does not work on sharded tensors"):
        torch.matmul(x, torch.ones(4, 2))
    with pytest.raises(RuntimeError, match="of size"):
        x + torch.ones(6, 4)
    with pytest.raises(IndexError):
        x.size(2)
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(_shard_tensor(a, spec).requires_grad_() * 2)


@on_ranks()
def test_lookups_and_gradients():
    rank, table = tessera.get_rank(), values(9, 4)
    all_indices = [
        torch.randint(9, (3, 2), generator=torch.Generator().manual_seed(seed)) for seed in range(4)
    ]
    for spec in (chunks(0, 0, 1, 2, 3), chunks(1, 2, 0)):
        for lookup in (
            lambda i, w: F.embedding(i, w),
            lambda i, w: F.embedding_bag(i, w, mode="mean"),
            lambda i, w: F.embedding_bag(i, w, mode="max"),
        ):
            weight = torch.nn.Parameter(_shard_tensor(table, spec))
            plain = torch.nn.Parameter(table.clone())
            result = lookup(all_indices[rank], weight)
            assert type(result) is torch.Tensor
            torch.testing.assert_close(result, lookup(all_indices[rank], plain))
            result.square().sum().backward()
            sum(lookup(each, plain).square().sum() for each in all_indices).backward()
            assert_sharded(weight.grad, plain.grad)


def test_operators_of_users():
    @custom_sharded_op_impl(torch.asin)
    def asin(types, args, kwargs, process_group):
        return process_group.size(), torch.asin(args[0].local_tensor())

    @custom_sharding_spec_op(ChunkShardingSpec, F.linear)
    def linear(types, args, kwargs, process_group):
        return F.linear(args[0], args[1].local_tensor())

    @on_ranks()
    def main():
        made = _shard_tensor(values(8, 3) / 10, chunks(0, 0, 1, 2, 3))
        size, result = torch.asin(made)
        assert size == 4 and torch.equal(result, torch.asin(made.local_tensor()))
        layer = torch.nn.Linear(3, 8)
        shard_parameter(layer, "weight", chunks(0, 0, 1, 2, 3))
        assert layer(values(5, 3)).shape == (5, 2)
        shard_parameter(layer, "bias", Rows(3))
        with pytest.raises(RuntimeError, match="does not work on sharded tensors"):
            F.linear(values(5, 3), values(8, 3), layer.bias)

    try:
        main()
    finally:
        del (
            sharded_tensor._CUSTOM_SHARDED_OPS[torch.asin],
            _CUSTOM_SHARDING_SPEC_OPS["ChunkShardingSpec"][F.linear],
        )
    with pytest.raises(TypeError, match="expects signature"):
        custom_sharded_op_impl(F.linear)(lambda types: None)


@dataclass
class Rows(ShardingSpec):
    """The first rows on one rank, the others on another."""

    first: int

    def build_metadata(self, tensor_sizes, tensor_properties):
        rows, *rest = tensor_sizes
        zeros = [0] * len(rest)
        shards = [
            ShardMetadata([0, *zeros], [self.first, *rest], "rank:2/cpu"),
            ShardMetadata([self.first, *zeros], [rows - self.first, *rest], "rank:0/cpu"),
        ]
        return ShardedTensorMetadata(shards, tensor_sizes, tensor_properties)


@on_ranks()
def test_specs_of_users():
    full, spec = values(6, 4), Rows(2)
    made = _shard_tensor(full, spec)
    assert_sharded(made, full)
    assert made.sharding_spec() is spec and type((made + 1).sharding_spec()) is Rows
    assert_sharded(made.reshard(grid()), full)
    assert_sharded(made.reshard(Rows(5)), full)
    assert_sharded(sharded_tensor.ones(Rows(0), 6, 4), torch.ones(6, 4))
    with pytest.raises(ValueError):
        sharded_tensor.ones(Rows(7), 6, 4)
    assert_sharded(pickle.loads(pickle.dumps(made)), full)


# --- modules


class Items(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.items = torch.nn.Embedding(10, 4)
        self.users = torch.nn.Embedding(7, 4)
        self.head = torch.nn.Linear(4, 3)

    def forward(self, items, users):
        return self.head(self.items(items) * self.users(users))


def filled(model):
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(values(*parameter.shape, seed=number))
    return model


def batches():
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randint(10, (6,), generator=generator), torch.randint(7, (6,), generator=generator))
        for _ in range(4)
    ]


def plan():
    return ShardingPlan({"items.weight": chunks(0, 3, 1, 0, 2), "users.weight": chunks(1, 0, 1)})


OPTIMISERS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01}),
]


@pytest.mark.parametrize("kind, options", OPTIMISERS, ids=lambda each: getattr(each, "__name__", ""))
@pytest.mark.parametrize("wrapped", [False, True])
@on_ranks()
def test_training_is_that_of_one_device(wrapped, kind, options):
    """All ranks have the same batch; a sharded parameter gets the sum of all ranks' gradients."""
    model, plain = filled(Items()), filled(Items())
    shard_module(model, plan())
    assert isinstance(model.items.weight, ShardedTensor) and isinstance(
        model.items.weight, torch.nn.Parameter
    )
    named = dict(named_params_with_sharded_tensor(model))
    assert sorted(named) == sorted(dict(plain.named_parameters()))
    optimiser = ShardedOptimizer(named, kind, **options) if wrapped else kind(model.parameters(), **options)
    reference = kind(plain.parameters(), **options)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2) for each in (optimiser, reference)]
    for items, users in batches():
        optimiser.zero_grad()
        reference.zero_grad()
        (model(items, users).square().mean() / 4).backward()
        for name in ("head.weight", "head.bias"):
            model.get_parameter(name).grad.mul_(4)
        plain(items, users).square().mean().backward()
        if not wrapped:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        optimiser.step()
        reference.step()
        for scheduler in schedulers:
            scheduler.step()
    for name, parameter in plain.named_parameters():
        ours = model.get_parameter(name)
        if isinstance(ours, ShardedTensor):
            assert_sharded(ours.detach(), parameter.detach(), rtol=1e-4, atol=1e-5)
        else:
            torch.testing.assert_close(ours, parameter, rtol=1e-4, atol=1e-5)


@on_ranks()
def test_sharded_optimizer_saves_its_state():
    made = [torch.nn.Parameter(_shard_tensor(values(6, 4), grid())) for _ in range(2)]
    optimisers = [ShardedOptimizer({"w": each}, torch.optim.Adam, lr=0.1) for each in made]
    for each in made[0], made[1]:
        loss_of(each).backward()
    optimisers[0].step()
    optimisers[1].load_state_dict(copy.deepcopy(optimisers[0].state_dict()))
    with torch.no_grad():
        made[1].copy_(made[0])
    for optimiser in optimisers:
        optimiser.step()
    assert torch.equal(made[0], made[1])
    more = torch.nn.Parameter(torch.ones(2))
    optimisers[0].add_param_group({"params": {"more": more}, "lr": 0.5})
    assert len(optimisers[0].param_groups) == 2 and optimisers[0].named_params["more"] is more


@on_ranks()
def test_plans():
    class Planner(ShardingPlanner):
        def build_plan(self, module):
            return ShardingPlan({name: chunks(0, 0, 1, 2, 3) for name, _ in module.named_parameters()})

    class Halves(Sharder):
        def shard(self, module):
            shard_parameter(module, "weight", chunks(0, 1, 2))
            return torch.nn.Sequential(module)

    model = Items()
    shard_module(model, Planner().build_plan(model))
    assert all(isinstance(each, ShardedTensor) for each in model.parameters())
    model = Items()
    shard_module(model, ShardingPlan({"items": Halves()}))
    assert isinstance(model.items, torch.nn.Sequential)
    assert model.items[0].weight.sharding_spec() == chunks(0, 1, 2)

    model = Items()
    spec = chunks(0, 0, 1)
    for wrong, error in (
        (ShardingPlan({"items.weight": torch.ones(1)}), TypeError),
        (ShardingPlan({"items.weight": spec}, output_plan={"": torch.ones(1)}), TypeError),
        (ShardingPlan({"goods.weight": spec}), AttributeError),
        (ShardingPlan({"items.wait": spec}), AttributeError),
        (ShardingPlan({"": Halves()}), KeyError),
        (ShardingPlan({"items.weight": spec, "items": Halves()}), RuntimeError),
    ):
        with pytest.raises(error):
            shard_module(model, wrong)
    assert not any(isinstance(each, ShardedTensor) for each in model.parameters())


class Held(torch.nn.Module):
    """Sharded tensors that are no parameters."""

    def __init__(self, spec=None, inner=True):
        super().__init__()
        self.table = None if spec is None else sharded_tensor.rand(spec, 4, 6)
        self.scale = torch.nn.Parameter(torch.rand(2))
        if inner:
            self.inner = Held(spec, inner=False)

    def forward(self):
        return self.table


@on_ranks()
def test_output_hooks():
    model = Held(chunks(0, 0, 1, 2, 3))
    shard_module(model, ShardingPlan({}, output_plan={"": chunks(1, 1, 0)}))
    assert model().sharding_spec() == chunks(1, 1, 0) and model.table.sharding_spec() == chunks(0, 0, 1, 2, 3)
    model = Held(chunks(0, 0, 1, 2, 3))
    shard_module(model, ShardingPlan({}, return_local_tensor=[""]))
    assert torch.equal(model(), model.table.local_tensor()[0])


@on_ranks()
def test_state_dicts():
    model = Held(grid_of(4, 6))
    model._register_state_dict_hook(state_dict_hook)
    state = model.state_dict()
    assert sorted(state) == ["inner.scale", "inner.table", "scale", "table"]
    buffer = io.BytesIO()
    torch.save(state, buffer)
    for weights_only in (False, True):
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=weights_only)
        other = Held()
        other._register_load_state_dict_pre_hook(pre_load_state_dict_hook, True)
        other.load_state_dict(loaded, strict=False)
        assert torch.equal(other.table, model.table) and torch.equal(other.inner.table, model.inner.table)
    # Parameters need no hooks.
    first, second = filled(Items()), Items()
    for each in first, second:
        shard_module(each, plan())
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.items.weight, first.items.weight)


def grid_of(rows, columns):
    half = rows // 2
    return EnumerableShardingSpec(
        [
            ShardMetadata([0, 0], [half, columns], "rank:3/cpu"),
            ShardMetadata([half, 0], [rows - half, 1], "rank:1/cpu"),
            ShardMetadata([half, 1], [rows - half, columns - 1], "rank:3/cpu"),
        ]
    )


@on_ranks()
def test_pickles():
    made = torch.nn.Parameter(_shard_tensor(values(6, 4), grid()))
    loaded = pickle.loads(pickle.dumps(made))
    assert torch.equal(loaded, made) and isinstance(loaded, torch.nn.Parameter) and loaded.requires_grad
    half = sharded_tensor.ones(chunks(0, 1, 3), 4, process_group=[1, 3])
    text = pickle.dumps(half)
    with load_with_process_group([1, 3]):
        assert torch.equal(pickle.loads(text), half)
        with pytest.raises(RuntimeError, match="nested"), load_with_process_group(None):
            pass
    with pytest.raises(RuntimeError, match="world size|rank"):
        pickle.loads(text)


def test_pickles_need_their_ranks():
    @on_ranks(2)
    def save():
        texts.append(pickle.dumps(sharded_tensor.ones(chunks(0, 0, 1), 4)))

    texts = []
    save()
    with pytest.raises(RuntimeError, match="start them"):
        pickle.loads(texts[0])

    @on_ranks(3)
    def load():
        with pytest.raises(RuntimeError, match="at save time was"):
            pickle.loads(texts[0])

    load()


# --- to and from the others


@on_ranks()
def test_dtensors():
    full = values(8, 4)
    made = _shard_tensor(full, chunks(0, 2, 1, 0, 3)).requires_grad_()
    placed = sharded.to_dtensor(made)
    assert placed.to_local().data_ptr() == made.local_tensor().data_ptr()
    assert torch.equal(placed.full_tensor(), full)
    (placed * placed).sum().backward()
    assert_sharded(made.grad, 2 * full)
    back = sharded.from_dtensor(placed.detach())
    assert back.local_tensor().data_ptr() == made.local_tensor().data_ptr()
    assert back.sharding_spec() == made.sharding_spec()
    assert_sharded(back, full)
    mesh = tessera.init_device_mesh("cpu", (2, 2))
    square = sharded.to_dtensor(
        _shard_tensor(full, grid_of(8, 4)), mesh, [tessera.Shard(0), tessera.Shard(1)]
    )
    assert torch.equal(square.full_tensor(), full)
    # What one rank asks for reaches all.
    placements = [tessera.Shard(0), tessera.Shard(1) if tessera.get_rank() else Replicate()]
    with pytest.raises(ValueError, match="replicated"):
        sharded.to_dtensor(made, mesh, placements)
    with pytest.raises(RuntimeError, match="threads"):
        tessera.to_torch(made)


@pytest.mark.parametrize("format", ["tessera", "dcp"])
def test_checkpoints(tmp_path, format):
    full = values(10, 4)

    @on_ranks(4)
    def save():
        state = {
            "w": _shard_tensor(full, grid_of(10, 4)),
            "p": _shard_tensor(full + 1, chunks(1, 2, 1)),
            "step": 3,
        }
        checkpoint.save(state, tmp_path / "c", format=format)

    @on_ranks(2)
    def load():
        mesh = tessera.init_device_mesh("cpu", (2,))
        state = {
            "w": sharded_tensor.zeros(chunks(0, 1, 0), 10, 4),
            "p": tessera.zeros(10, 4, device_mesh=mesh, placements=[tessera.Shard(0)]),
            "step": 0,
        }
        checkpoint.load(state, tmp_path / "c")
        assert_sharded(state["w"], full)
        assert torch.equal(state["p"].full_tensor(), full + 1) and state["step"] == 3

    save()
    load()
    loaded = checkpoint.load_full(tmp_path / "c")
    assert torch.equal(loaded["w"], full)


@on_ranks(2)
def test_calls_can_be_logged():
    from tessera.sharded.sharded_tensor.logger import _get_or_create_logger

    logger = _get_or_create_logger()
    records = []
    try:
        if tessera.get_rank() == 0:
            logger.handlers[0].handle = records.append
        tessera._C.meet("the handler is set")
        sharded_tensor.ones(chunks(0, 0, 1), 4).gather()
        tessera._C.meet("both have called")
        if tessera.get_rank() == 0:
            texts = [each.getMessage() for each in records]
            assert any("rank 1: ShardedTensor::gather" in each for each in texts), texts
    finally:
        tessera._C.set_sharded_log_handler(None)


# --- processes


@pytest.mark.parametrize("what", ["tensors", "torchs_own", "rpc", "training"])
def test_processes(what):
    for output in launch(3, what, worker=WORKER):
        assert output.strip().endswith("done")
