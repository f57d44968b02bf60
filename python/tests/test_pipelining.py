"""Pipelines from Python, against one device."""

import copy
import pathlib

import pytest
import torch
from models import filled
from ranks import on_ranks, values
from tessera.parallel import replicate
from tessera.pipelining import (
    PipelineSchedule,
    PipelineStage,
    PipelineTable,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    get_schedule_class,
)
from test_processes import launch
from torch import nn

import tessera
from tessera import DTensor, Replicate, Shard

CLOSE = {"rtol": 1e-4, "atol": 1e-6}
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x, scale=1.0):
        return x + torch.tanh(self.linear(self.norm(x))) * scale


def make_model() -> nn.Sequential:
    return filled(nn.Sequential(*(Layer() for _ in range(8))))


def mse(output, target):
    return nn.functional.mse_loss(output, target)


def one_device(x, y):
    model = make_model()
    loss = mse(model(x), y)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def make_stages(name, mesh, distribute=None):
    """The stages of this rank; their layers have the names that they have in the model."""
    per_rank = 2 if name == "Interleaved1F1B" else 1
    count = per_rank * mesh.size()
    stages = []
    for index in range(mesh.get_local_rank(), count, mesh.size()):
        model = make_model()
        part = nn.Sequential()
        for number in range(8 * index // count, 8 * (index + 1) // count):
            part.add_module(str(number), model[number])
        if distribute:
            part = distribute(part)
        stages.append(PipelineStage(part, index, count, group=mesh))
    return stages


def make_schedule(name, stages, count, **options):
    kind = get_schedule_class(name)
    return kind(stages if name == "Interleaved1F1B" else stages[0], count, loss_fn=mse, **options)


def assert_gradients(stages, expected):
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            torch.testing.assert_close(gradient, expected[name], **CLOSE)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_equals_one_device(name, ranks):
    @on_ranks(ranks)
    def body():
        mesh = tessera.init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
        x, y = values(7, 6), values(7, 6, seed=1)
        loss, gradients = one_device(x, y)
        with torch.no_grad():
            outputs = make_model()(x)
        last = mesh.get_local_rank() == ranks - 1
        for count in (1, 3, 4):
            stages = make_stages(name, mesh)
            schedule = make_schedule(name, stages, count)
            for _ in range(2):  # the second step knows the shapes
                losses = [None]
                for stage in stages:
                    stage.submod.zero_grad()
                result = schedule.step(x, target=y, losses=losses)
                assert_gradients(stages, gradients)
                if last:
                    torch.testing.assert_close(result, outputs, **CLOSE)
                    sizes = [part.size(0) for part in x.tensor_split(count)]
                    mean = sum(part.item() * size for part, size in zip(losses, sizes, strict=True)) / 7
                    assert abs(mean - loss) < 1e-5
                else:
                    assert result is None and losses == [None]
            assert schedule.step(x, target=y, return_outputs=False) is None
            evaluated = schedule.eval(x, target=y, losses=losses)
            assert not last or (len(losses) == count and not evaluated.requires_grad)

    body()


@pytest.mark.parametrize("name", SCHEDULES)
@on_ranks()
def test_with_data_parallel(name):
    mesh = tessera.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    x, y = values(8, 6), values(8, 6, seed=1)
    _, gradients = one_device(x, y)
    # By placement: the batch is one tensor.
    stages = make_stages(
        name,
        mesh["pp"],
        lambda part: replicate(tessera.distribute_module(part, mesh["dp"]), mesh["dp"]),
    )
    batch, targets = (tessera.distribute_tensor(t, mesh["dp"], [Shard(0)]) for t in (x, y))
    result = make_schedule(name, stages, 2).step(batch, target=targets)
    assert result is None or isinstance(result, DTensor)
    assert_gradients(stages, gradients)
    for stage in stages:
        assert all(parameter.grad.placements == (Replicate(),) for parameter in stage.submod.parameters())
    # Or each rank with its own batch, and gradients are averaged, once.
    stages = make_stages(name, mesh["pp"], lambda part: replicate(part, mesh["dp"]))
    rank = mesh.get_local_rank("dp")
    make_schedule(name, stages, 2).step(x.chunk(2)[rank], target=y.chunk(2)[rank])
    assert_gradients(stages, gradients)


class Pair(nn.Module):
    """Several inputs and outputs, and keyword arguments."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(6, 6), last

    def forward(self, x, positions, *, scale, name):
        assert name == "a name"
        y = self.linear(x) * scale + positions.unsqueeze(1)
        return y if self.last else (y, positions)


@on_ranks(2)
def test_several_tensors_and_keywords():
    first, second = filled(Pair(False)), filled(Pair(True))
    mesh = tessera.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    x, positions, scale, y = values(6, 6), torch.arange(6), values(6, 1, seed=2), values(6, 6, seed=1)
    loss = mse(second(*first(x, positions, scale=scale, name="a name"), scale=scale, name="a name"), y)
    loss.backward()
    rank = mesh.get_local_rank()
    expected = {name: parameter.grad for name, parameter in (first, second)[rank].named_parameters()}
    part = copy.deepcopy((first, second)[rank])
    part.zero_grad()
    stage = PipelineStage(part, rank, 2, "cpu", group=mesh)
    losses = []
    schedule = ScheduleGPipe(stage, 3, loss_fn=lambda output, target, weight: mse(output, target) * weight)
    arguments = (x, positions) if rank == 0 else ()
    schedule.step(
        *arguments, target=y, losses=losses, loss_kwargs={"weight": 1.0}, scale=scale, name="a name"
    )
    assert_gradients([stage], expected)
    assert len(losses) == 3 * rank


def test_tables():
    table = PipelineTable.one_f_one_b(2, 3)
    assert table.actions[1][:4] == ["1RECV_F0", "1F0", "1RECV_F1", "1B0"]
    assert table.simulate().peak_live == [2, 1] and table.simulate().bubble == 0.25
    assert table.simulate(forward=1, backward=2).time == 12
    assert table.grid().splitlines()[2] == "rank 0  F0 F1 .  B0 F2 B1 .  B2"
    again = PipelineTable(table.name, 3, table.rank_of_stage, table.actions)
    assert again == table and again.with_messages() == table
    broken = PipelineTable("broken", 3, [0, 1], [table.actions[0][:-1], table.actions[1]])
    with pytest.raises(ValueError, match='"broken" cannot run: rank 0 never does 0B2'):
        broken.check()
    with pytest.raises(ValueError, match='"1G0" is no action'):
        PipelineTable("broken", 3, [0], [["1G0"]])
    with pytest.raises(ValueError, match="there are GPipe, 1F1B and Interleaved1F1B"):
        get_schedule_class("ZBV")


@on_ranks(2)
def test_table_of_ones_own():
    mesh = tessera.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    stages = make_stages("1F1B", mesh)
    actions = [["0F0", "0F1", "0B1", "0B0"], ["1F0", "1F1", "1B1", "1B0"]]
    table = PipelineTable("last first", 2, [0, 1], actions).with_messages()
    x, y = values(8, 6), values(8, 6, seed=1)
    PipelineSchedule(stages, table, mse).step(x, target=y)
    assert_gradients(stages, one_device(x, y)[1])


class Fails(nn.Module):
    def __init__(self, culprit: bool, backward: bool) -> None:
        super().__init__()
        self.linear, self.culprit, self.backward = nn.Linear(6, 6), culprit, backward

    def forward(self, x):
        if self.culprit and not self.backward:
            raise KeyError("on purpose")
        return FailsInBackward.apply(self.linear(x)) if self.culprit else self.linear(x)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise KeyError("on purpose")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_failure_reaches_all_stages(culprit, backward):
    def body():
        mesh = tessera.init_device_mesh("cpu", (3,), mesh_dim_names=("pp",))
        rank = mesh.get_local_rank()
        schedule = Schedule1F1B(PipelineStage(Fails(rank == culprit, backward), rank, 3, group=mesh), 4, mse)
        with pytest.raises(KeyError if rank == culprit else RuntimeError, match="on purpose") as caught:
            schedule.step(values(8, 6), target=values(8, 6))
        return str(caught.value)

    messages = tessera.run(3, body, timeout=60)
    for rank, message in enumerate(messages):
        assert rank == culprit or f"ank {culprit} failed" in message


@on_ranks(2)
def test_says_what_is_wrong():
    mesh = tessera.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    rank = mesh.get_local_rank()
    (stage,) = make_stages("1F1B", mesh)
    assert (stage.is_first, stage.is_last) == (rank == 0, rank == 1)
    assert (stage.group_rank, stage.group_size) == (rank, 2)
    with pytest.raises(ValueError, match="ScheduleInterleaved1F1B takes several"):
        Schedule1F1B(PipelineStage(stage.submod, rank, 4, group=mesh), 2)
    with pytest.raises(ValueError, match="got none"):
        ScheduleInterleaved1F1B([], 2)
    schedule = Schedule1F1B(stage, 4, mse)
    x, y = values(8, 6), values(8, 6, seed=1)
    with pytest.raises(RuntimeError, match="Call eval"), torch.no_grad():
        schedule.step(x, target=y)
    refusal = ValueError if rank == 0 else RuntimeError  # what one rank refuses, the other hears of
    with pytest.raises(refusal, match="got no tensor"):
        schedule.step(target=y)
    with pytest.raises(refusal, match="cannot be split into 4 micro-batches"):
        schedule.step(values(3, 6), target=y)
    with pytest.raises(ValueError, match="give loss_fn"):
        schedule.step(x)
    schedule.step(x, target=y)
    assert_gradients([stage], one_device(x, y)[1])


@on_ranks(2)
def test_stages_return_tensors():
    mesh = tessera.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))

    class Wrong(nn.Module):
        def forward(self, x):
            return {"x": x}

    stage = PipelineStage(Wrong(), mesh.get_local_rank(), 2, group=mesh)
    with pytest.raises((TypeError, RuntimeError), match="a tensor or a tuple of tensors, not dict"):
        ScheduleGPipe(stage, 2).eval(values(4, 6))


def test_processes():
    worker = pathlib.Path(__file__).with_name("pipelining_worker.py")
    for output in launch(4, worker=worker):
        assert output.strip().endswith("done")
