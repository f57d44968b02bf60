"""CommDebugMode and visualize_sharding, as torch.distributed.tensor.debug has them."""

import itertools
import json

import pytest
import torch
import torch.distributed._functional_collectives
from models import MLP
from ranks import on_ranks, values
from tessera.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import tessera
from tessera import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from tessera.debug import CommDebugMode, visualize_sharding

all_reduce = torch.ops.c10d_functional.all_reduce
all_gather = torch.ops.c10d_functional.all_gather_into_tensor
reduce_scatter = torch.ops.c10d_functional.reduce_scatter_tensor


def parallel_mlp(mesh):
    return parallelize_module(MLP(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


@on_ranks()
def test_counts_are_keyed_as_torch_does():
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(values(8, 4), mesh, [Shard(0)])
    mode = CommDebugMode()
    with mode as entered:
        assert entered is mode
        x.redistribute(placements=[Replicate()])
    assert mode.get_comm_counts() == {all_gather: 1} and mode.get_total_counts() == 1
    assert mode.get_comm_counts()[all_reduce] == 0
    with mode:
        x.redistribute(placements=[Shard(1)])
    assert mode.get_comm_counts() == {torch.ops._dtensor.shard_dim_alltoall: 1}
    partial = DTensor.from_local(values(8, 4), mesh, [Partial()])
    with mode:
        partial.redistribute(placements=[Shard(0)])
        partial.redistribute(placements=[Replicate()])
    assert mode.get_comm_counts() == {reduce_scatter: 1, all_reduce: 1}
    with mode:
        distribute_tensor(values(8, 4), mesh, [Shard(0)])
    assert mode.comm_counts == {torch.ops.c10d.scatter_: 1}
    with mode:
        x + x
    assert mode.get_total_counts() == 0 and repr(mode) == "CommDebugMode(get_total_counts()=0)"


@on_ranks()
def test_nothing_is_counted_outside():
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(values(8, 4), mesh, [Shard(0)])
    outer, inner = CommDebugMode(), CommDebugMode()
    x.full_tensor()
    with outer:
        x.full_tensor()
        with inner:
            x.full_tensor()
        x.full_tensor()
    x.full_tensor()
    assert outer.get_total_counts() == 3 and inner.get_total_counts() == 1


@on_ranks()
def test_by_module_and_phase():
    mesh = init_device_mesh("cpu", (4,))
    model = parallel_mlp(mesh)
    x = values(4, 8).requires_grad_()
    with CommDebugMode() as mode:
        model(x).sum().backward()
    counts = mode.comm_module_counts
    name = type(model).__name__
    for module in ("Global", name, f"{name}.down"):
        assert counts[module]["forward"] == {all_reduce: 1}, module
    for module in ("Global", name, f"{name}.up"):
        assert counts[module]["backward"] == {all_reduce: 1}, module
    assert not counts[f"{name}.down"]["backward"] and not counts[f"{name}.up"]["forward"]
    assert mode.get_total_counts() == 2


@on_ranks()
def test_an_optimiser_communicates_under_global():
    mesh = init_device_mesh("cpu", (4,))
    weight = torch.nn.Parameter(distribute_tensor(values(4, 4), mesh, [Replicate()]))
    x = distribute_tensor(values(8, 4), mesh, [Shard(0)])
    optimiser = torch.optim.SGD([weight], lr=0.1)
    (x @ weight).sum().backward()
    assert weight.grad.placements == (Partial(),)
    with CommDebugMode() as mode:
        optimiser.step()
    assert mode.get_comm_counts() == {all_reduce: 1}
    assert mode.comm_module_counts == {"Global": {"forward": {all_reduce: 1}, "backward": {}}}


@on_ranks()
def test_activation_checkpointing_is_told_apart():
    mesh = init_device_mesh("cpu", (4,))
    model = parallel_mlp(mesh)
    x = values(4, 8).requires_grad_()
    with CommDebugMode() as mode:
        checkpoint(model, x, use_reentrant=False).sum().backward()
    name = f"{type(model).__name__}.up"
    operations = mode.comm_module_operation_counts[name]["operations_list"]
    again = [each for each in operations if each["is_activation_checkpointing"]]
    assert any(str(each["name"]) == "aten.linear.default" for each in again)
    assert "ACTIVATION CHECKPOINTING" in mode.generate_comm_debug_tracing_table()


@on_ranks()
def test_parameters_and_their_sharding():
    mesh = init_device_mesh("cpu", (4,))
    model = parallel_mlp(mesh)
    mode = CommDebugMode()
    for _ in range(2):
        with mode:
            assert mode.get_parameter_info() == {} and mode.get_sharding_info() == {}
            model(values(4, 8))
        name = type(model).__name__
        assert mode.get_sharding_info() == {
            f"{name}.up.weight": (Shard(0),),
            f"{name}.up.bias": (Shard(0),),
            f"{name}.down.weight": (Shard(1),),
            f"{name}.down.bias": (Replicate(),),
        }
        assert list(mode.get_parameter_info()) == [f"{name}.up", f"{name}.down"]
    helper = mode.advanced_module_tracker.module_helper_dict
    assert helper[f"{name}.up"]["depth"] == 2 and "Linear" in helper[f"{name}.up"]["module_type"]


@on_ranks()
def test_tables_and_files(tmp_path):
    mesh = init_device_mesh("cpu", (4,))
    model = parallel_mlp(mesh)
    with CommDebugMode() as mode:
        model(values(4, 8)).sum().backward()
    levels = [mode.generate_comm_debug_tracing_table(level) for level in range(4)]
    assert all(len(less) < len(more) for less, more in itertools.pairwise(levels))
    assert "all_reduce: 1" in levels[0] and "aten" not in levels[0] and "*Parameter List" in levels[1]
    assert "sharding: [(Shard(dim=0),)" in levels[3] or "(Shard(dim=0),)" in levels[3]
    text, dump = tmp_path / f"log{tessera.get_rank()}.txt", tmp_path / f"log{tessera.get_rank()}.json"
    mode.log_comm_debug_tracing_table_to_file(str(text), noise_level=1)
    assert "\033" not in text.read_text() and "FORWARD PASS" in text.read_text()
    mode.generate_json_dump(str(dump))
    tree = json.loads(dump.read_text())
    assert tree["fqn"] == "Global" and tree["collectives_forward"] == [["c10d_functional.all_reduce", 1]]
    (child,) = tree["children"]
    assert [each["fqn"].rpartition(".")[2] for each in child["children"]] == ["up", "down"]
    assert child["children"][0]["parameters"][0] == ["weight", "(Shard(dim=0),)"]


@on_ranks()
def test_a_module_that_raises_leaves_no_trace():
    class Fails(torch.nn.Module):
        def forward(self, x):
            raise ValueError("no")

    module = torch.nn.Sequential(Fails())
    with CommDebugMode() as mode:
        with pytest.raises(ValueError, match="no"):
            module(values(2))
        assert mode.advanced_module_tracker.name == "Global"
    assert not module[0]._forward_hooks and not module._forward_hooks


def test_entered_inside_of_itself_it_leaves_no_hooks():
    def main():
        mode = CommDebugMode()
        with mode, mode:
            torch.nn.Linear(2, 2)(values(2, 2))
        return mode.get_total_counts()

    assert tessera.run(1, main) == [0]
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_an_error_of_a_module_stays_what_it_is():
    class Failing(torch.nn.Module):
        def forward(self, x):
            raise KeyError("mine")

    def main():
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), Failing())
        for _ in range(2):
            with CommDebugMode(), pytest.raises(KeyError, match="mine"):
                model(values(2, 2))
        assert not model._forward_hooks and not model[1]._forward_hooks

    tessera.run(1, main)


def test_visualize_sharding(capsys):
    def main():
        mesh = init_device_mesh("cpu", (4,))
        square = init_device_mesh("cpu", (2, 2))
        visualize_sharding(distribute_tensor(values(10, 4), mesh, [Shard(0)]), header="rows")
        visualize_sharding(distribute_tensor(values(4, 4), square, [Shard(1), Replicate()]))
        visualize_sharding(distribute_tensor(values(8), mesh, [tessera._StridedShard(0, split_factor=2)]))
        visualize_sharding(distribute_tensor(values(0, 4), mesh, [Shard(0)]))
        with pytest.raises(RuntimeError, match="one or two dims"):
            visualize_sharding(distribute_tensor(values(2, 2, 2), mesh))

    tessera.run(4, main)
    assert capsys.readouterr().out.splitlines() == [
        "rows",
        "         Col 0-3",
        "-------  -------",
        "Row 0-2  cpu:0",
        "Row 3-5  cpu:1",
        "Row 6-8  cpu:2",
        "Row 9-9  cpu:3",
        "         Col 0-1  Col 2-3",
        "-------  -------  -------",
        "Row 0-3  cpu:0,1  cpu:2,3",
        "         Col 0-0",
        "-------  -------",
        *(f"Row {row}-{row}  cpu:{row % 4}" for row in range(8)),
    ]
