"""Checkpoints: saved and loaded by ours, and by those whose formats they are."""

import collections
import json
import math
import os
import pathlib
import subprocess
import sys

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import MLP, filled
from ranks import assert_full, on_ranks, values
from tessera.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from test_processes import launch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tessera
from tessera import DTensor, Partial, Replicate, Shard, checkpoint, distribute_tensor, init_device_mesh

safetensors_torch = pytest.importorskip("safetensors.torch")
from safetensors import safe_open  # noqa: E402

WORKER = pathlib.Path(__file__).with_name("checkpoint_worker.py")
FORMATS = ("tessera", "dcp", "huggingface")

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def known_to(format, dtype):
    """safetensors has no complex128."""
    return format == "dcp" or dtype != torch.complex128


def counted(*shape, dtype=torch.float32):
    """Numbers by place, exact in each dtype, of which no two near ones are equal."""
    count = torch.arange(math.prod(shape)).reshape(shape) % 100
    return (count % 3 == 0) if dtype == torch.bool else count.to(torch.float32).to(dtype)


def same_bits(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous().flatten().view(torch.uint8).equal(b.contiguous().flatten().view(torch.uint8))
    )


Point = collections.namedtuple("Point", "x y")


def nested(mesh, real):
    """A state with all that one can hold; with other values if not real."""
    tensor = counted(7, 5) if real else torch.zeros(7, 5)
    return {
        "model": {"w": distribute_tensor(tensor, mesh, [Shard(0)]), "b": tensor[0].clone()},
        "list": [tensor.clone(), {"deep": [1.5 if real else 0.0]}],
        "tuple": (tensor.clone(), 3 if real else 0),
        "point": Point(1 if real else 0, "text" if real else ""),
        "size": torch.Size([2, 3] if real else [0, 0]),
        "state": {0: {"step": tensor[0, 0].clone()}, 1: {"step": 8 if real else 0}},
        "betas": (0.9, 0.999) if real else (0.0, 0.0),
        "names": ["a", "b", "c"] if real else ["x"],
        "odd.key/with 'marks'": -5 if real else 0,
        "bytes": b"\x00\xff" if real else b"",
        "none": None if real else 1,
        "flag": real,
        "large": 2**62 if real else 0,
        "infinite": float("inf") if real else 0.0,
        "empty": {},
    }


def assert_nested(state, expected):
    assert type(state) is type(expected)
    if isinstance(expected, DTensor):
        assert same_bits(state.to_local(), expected.to_local())
    elif isinstance(expected, torch.Tensor):
        assert same_bits(state, expected)
    elif isinstance(expected, dict):
        assert list(state) == list(expected)
        for key in expected:
            assert_nested(state[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(state) == len(expected)
        for item, other in zip(state, expected):
            assert_nested(item, other)
    else:
        assert state == expected


@pytest.mark.parametrize("format", ("tessera", "dcp"))
def test_all_kinds_of_values_are_loaded_into_the_same_containers(tmp_path, format):
    @on_ranks(3)
    def save():
        checkpoint.save(nested(init_device_mesh("cpu", (3,)), True), tmp_path / "c", format=format)

    @on_ranks(2)
    def load():
        mesh = init_device_mesh("cpu", (2,))
        state, expected = nested(mesh, False), nested(mesh, True)
        model, weight, names, first = state["model"], state["model"]["w"], state["names"], state["state"][0]
        assert checkpoint.load(state, tmp_path / "c") == ([], [])
        assert_nested(state, expected)
        assert state["model"] is model and model["w"] is weight and state["names"] is names
        assert state["state"][0] is first

    save()
    load()
    # With no ranks at all.
    full = checkpoint.load_full(tmp_path / "c")
    assert same_bits(full["model"]["w"], counted(7, 5)) and same_bits(full["list"][0], counted(7, 5))
    assert (
        full["betas"] == [0.9, 0.999] and full["state"]["1"] == {"step": 8} and full["bytes"] == b"\x00\xff"
    )
    assert full["point"] == [1, "text"] and full["none"] is None and full["flag"] is True


def test_one_process_without_ranks(tmp_path):
    state = {"w": counted(4, 3), "step": 7}
    checkpoint.save(state, tmp_path / "step-7")
    loaded = {"w": torch.zeros(4, 3), "step": 0}
    checkpoint.load(loaded, str(tmp_path / "step-7"))
    assert_nested(loaded, state)


@pytest.mark.parametrize("format", FORMATS)
def test_formats_are_read_by_those_whose_they_are(tmp_path, format):
    """All dtypes and kinds of shapes, saved from shards."""
    path = tmp_path / "c"
    full = {
        f"{dtype}.{len(shape)}.{shape[0] if shape else ''}": counted(*shape, dtype=dtype)
        for dtype in DTYPES
        if known_to(format, dtype)
        for shape in ((), (0,), (7, 5), (2, 9))
        if format != "tessera" or 0 not in shape  # which only its index names
    }

    @on_ranks(3)
    def save():
        mesh = init_device_mesh("cpu", (3,))
        state = {
            key: distribute_tensor(value, mesh, [Shard(value.ndim - 1)], src_data_rank=None)
            if value.ndim
            else value
            for key, value in full.items()
        }
        checkpoint.save(state, path, format=format)

    save()
    loaded = {}
    if format == "huggingface":
        for file in path.glob("*.safetensors"):
            loaded.update(safetensors_torch.load_file(file))
            with safe_open(file, "pt") as opened:
                assert opened.metadata()["format"] == "pt"
    else:
        loaded = {key: torch.full_like(value, 1) for key, value in full.items()}
        reader = HuggingFaceStorageReader(str(path)) if format == "tessera" else None
        dcp.load(loaded, checkpoint_id=path, storage_reader=reader)
    assert loaded.keys() == full.keys()
    for key, value in full.items():
        assert same_bits(loaded[key], value), key
    if format == "tessera":
        for file in path.glob("*.safetensors"):
            for name, part in safetensors_torch.load_file(file).items():
                assert part.dtype == full[name].dtype


@pytest.mark.parametrize("format", FORMATS)
def test_theirs_are_read_by_us(tmp_path, format):
    path = tmp_path / "c"
    known = [dtype for dtype in DTYPES if known_to(format, dtype)]
    full = {f"w.{dtype}": counted(7, 5, dtype=dtype) for dtype in known} | {"scalar": torch.tensor(3.5)}
    if format == "dcp":
        dcp.save(
            {"model": full, "step": 3, "lr": 0.1, "names": ["a"], "betas": (1, 2), "no": None},
            checkpoint_id=path,
        )
        full = {f"model.{key}": value for key, value in full.items()}
    else:
        path.mkdir()
        safetensors_torch.save_file(full, path / "model.safetensors")

    @on_ranks(3)
    def load():
        mesh = init_device_mesh("cpu", (3,))
        state = {
            key: distribute_tensor(torch.zeros_like(value), mesh, [Shard(0)], src_data_rank=None)
            if value.ndim
            else torch.zeros_like(value)
            for key, value in full.items()
        }
        others = {"step": 0, "lr": 0.0, "names": [], "betas": (), "no": 1} if format == "dcp" else {}
        state.update(others)
        checkpoint.load(state, path / "model.safetensors" if format == "huggingface" else path)
        for key, value in full.items():
            local = state[key].to_local() if value.ndim else state[key]
            rows = value.tensor_split([3, 6])[mesh.get_rank()] if value.ndim else value
            assert same_bits(local, rows), key
        for key, value in {"step": 3, "lr": 0.1, "names": ["a"], "betas": (1, 2), "no": None}.items():
            assert key not in others or state[key] == value

    load()


def trained(mesh, up, down):
    model = filled(MLP())
    parallelize_module(model, mesh, {"up": up, "down": down})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer


def steps(model, optimizer, mesh, count):
    x = values(8, 8) if mesh is None else distribute_tensor(values(8, 8), mesh)
    for _ in range(count):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


COLUMN = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}
ROW = {"up": RowwiseParallel(use_local_output=False), "down": ColwiseParallel(use_local_output=False)}


@pytest.mark.parametrize("format", ("tessera", "dcp"))
@pytest.mark.parametrize("helpers", (False, True))
def test_training_goes_on_on_another_mesh(tmp_path, format, helpers):
    """By state_dict(), or as the helpers of torch give it, which also make the state of a new optimizer."""

    def state_of(model, optimizer):
        if helpers:
            return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    @on_ranks(4)
    def first():
        mesh = init_device_mesh("cpu", (4,))
        model, optimizer = trained(mesh, **COLUMN)
        steps(model, optimizer, mesh, 3)
        checkpoint.save(state_of(model, optimizer), tmp_path / "c", format=format)
        saved = [p.detach().full_tensor().clone() for p in model.parameters()]
        steps(model, optimizer, mesh, 3)
        expected = [p.detach().full_tensor() for p in model.parameters()]
        if mesh.get_rank() == 0:
            torch.save((saved, expected), tmp_path / "expected.pt")

    @on_ranks(3)
    def second():
        saved, expected = torch.load(tmp_path / "expected.pt")
        mesh = init_device_mesh("cpu", (3,))
        model, optimizer = trained(mesh, **ROW)
        if not helpers:
            steps(model, optimizer, mesh, 1)  # makes the optimizer's state
        state = state_of(model, optimizer)
        checkpoint.load(state, tmp_path / "c")
        if helpers:
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
        else:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        assert all(isinstance(p, DTensor) for p in model.parameters())
        for parameter, value in zip(model.parameters(), saved):
            assert torch.equal(parameter.detach().full_tensor(), value)
        steps(model, optimizer, mesh, 3)
        for parameter, value in zip(model.parameters(), expected):
            assert_full(parameter.detach(), value, rtol=1e-4, atol=1e-6)

    first()
    second()


def test_an_optimizer_saved_by_us_is_loaded_by_torch(tmp_path):
    plain = filled(MLP())
    expected = torch.optim.AdamW(plain.parameters(), lr=0.01)
    steps(plain, expected, None, 3)

    @on_ranks(4)
    def save():
        mesh = init_device_mesh("cpu", (4,))
        model, optimizer = trained(mesh, **COLUMN)
        steps(model, optimizer, mesh, 3)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoint.save(state, tmp_path / "c", format="dcp")

    save()
    model = filled(MLP())
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, optimizer, None, 1)  # makes the optimizer's state
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "c")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 0.01
    steps(model, optimizer, None, 2)
    steps(plain, expected, None, 2)
    for found, wanted in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_schedulers_and_optimizers_without_state(tmp_path):
    def make():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])

    optimizer, scheduler = make()
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    checkpoint.save(state, tmp_path / "ours")
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    for path in ("ours", "theirs"):
        optimizer, scheduler = make()
        loaded = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        checkpoint.load(loaded, tmp_path / path)
        optimizer.load_state_dict(loaded["optimizer"])
        scheduler.load_state_dict(loaded["scheduler"])
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01) and scheduler.last_epoch == 3


def test_report_and_errors_list_everything(tmp_path):
    checkpoint.save({"a": torch.ones(2), "b": torch.ones(3), "c": 1}, tmp_path / "c")

    @on_ranks(2)
    def load():
        state = {"a": torch.zeros(2), "b": torch.zeros(3), "d": 4}
        report = checkpoint.load(state, tmp_path / "c", strict=False)
        assert report.missing == ["d"] and report.unexpected == ["c"]
        assert torch.equal(state["a"], torch.ones(2)) and state["d"] == 4
        wrong = {"a": torch.zeros(5), "b": torch.zeros(3, dtype=torch.half), "d": 4}
        with pytest.raises(RuntimeError) as error:
            checkpoint.load(wrong, tmp_path / "c")
        for text in (
            "a: Float [2]",
            "Half [3]",
            "missing in the checkpoint:\n    d",
            "only in the checkpoint:\n    c",
        ):
            assert text in str(error.value)
        assert not wrong["a"].any()

    load()


def test_bad_values_are_errors(tmp_path):
    path = tmp_path / "c"
    endless = {}
    endless["again"] = endless
    for state, error, text in (
        ({"model": {"f": [1, lambda: 0]}}, TypeError, "a function at 'model.f.1'"),
        ({"s": {1, 2}}, TypeError, "a set at 's'"),
        ({(1, 2): 3}, TypeError, "a key of type tuple"),
        ({"a": {1: 2, "1": 3}}, ValueError, "the keys 1 and '1' below 'a'"),
        ({"a.b": 1, "a": {"b": 2}}, ValueError, "'a.b'"),
        ({"n": 2**70}, ValueError, "'n' of the state dict does not fit"),
        ({"m": torch.empty(2, device="meta")}, RuntimeError, "'m' is on the meta device"),
        ({"t": "\ud800"}, UnicodeEncodeError, "surrogates"),
        (endless, RecursionError, "recursion"),
        ([1], TypeError, "must be a dict, got list"),
    ):
        with pytest.raises(error, match=text):
            checkpoint.save(state, path)
        assert not path.exists()
    with pytest.raises(ValueError, match='"tessera", "huggingface" or "dcp", got "zip"'):
        checkpoint.save({}, path, format="zip")
    with pytest.raises(ValueError, match='"while_loading" or "never", got "no"'):
        checkpoint.load({}, path, verify="no")
    with pytest.raises(RuntimeError, match="c"):
        checkpoint.load({}, path)
    with pytest.raises(TypeError):
        checkpoint.save({}, 5)
    checkpoint.save({"a": 1}, path)
    with pytest.raises(TypeError, match="a function at 'a'"):
        checkpoint.load({"a": lambda: 0}, path)


def test_what_one_rank_refuses_every_rank_hears_of(tmp_path):
    @on_ranks(3)
    def save():
        state = {"f": (lambda: 0) if tessera.get_rank() == 1 else 0}
        with pytest.raises(RuntimeError, match="failed on rank 1: .*a function at 'f'"):
            checkpoint.save(state, tmp_path / "c")
        # They are still in step.
        checkpoint.save({"f": 1}, tmp_path / "c")
        with pytest.raises(RuntimeError, match="failed on rank 1: .*a function at 'f'"):
            checkpoint.load(state, tmp_path / "c")

    save()


def test_a_flipped_byte_is_an_error_and_nothing_changes(tmp_path):
    checkpoint.save({"w": counted(100)}, tmp_path / "c")
    (file,) = (tmp_path / "c").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(content)
    state = {"w": torch.zeros(100)}
    with pytest.raises(RuntimeError, match="w"):
        checkpoint.load(state, tmp_path / "c")
    assert not state["w"].any()
    checkpoint.load(state, tmp_path / "c", verify="never")
    assert state["w"].any()


def test_latest_and_keep_last(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    for step in (8, 9, 10):
        checkpoint.save({"step": step}, tmp_path / f"step-{step}", keep_last=2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-10", "step-9"]
    latest = checkpoint.latest(tmp_path)
    assert latest == str(tmp_path / "step-10") and checkpoint.load_full(latest) == {"step": 10}


@on_ranks(3)
def check_async(path):
    mesh = init_device_mesh("cpu", (3,))
    state = {
        "w": distribute_tensor(counted(50, 7), mesh, [Shard(0)]),
        "b": torch.ones(3),
        "step": 1,
        "names": ["a"],
    }
    seen = []
    pending = checkpoint.async_save(state, path, progress=seen.append)
    state["w"].zero_()
    state["b"].zero_()
    state["step"] = 2
    state["names"].append("b")
    pending.wait()
    pending.wait()
    assert pending.done() and seen[-1].phase == "saving" and seen[-1].bytes == seen[-1].total
    checkpoint.load(state, path)
    assert_full(state["w"], counted(50, 7))
    assert torch.equal(state["b"], torch.ones(3)) and state["step"] == 1 and state["names"] == ["a"]


def test_async_save(tmp_path):
    check_async(tmp_path / "c")
    (tmp_path / "file").write_text("")
    pending = checkpoint.async_save({"a": 1}, tmp_path / "file")
    with pytest.raises(RuntimeError, match="is a file"):
        pending.wait()
    with pytest.raises(TypeError, match="a function at 'f'"):
        checkpoint.async_save({"f": lambda: 0}, tmp_path / "d")


def test_async_save_is_finished_when_the_process_ends(tmp_path):
    script = """
import sys, torch, tessera
pending = tessera.checkpoint.async_save({"w": torch.ones(10_000_000)}, sys.argv[1], progress=lambda p: None)
lost = tessera.checkpoint.async_save({"w": torch.ones(1)}, sys.argv[0], progress=lambda p: None)
"""
    file = tmp_path / "script.py"
    file.write_text(script)
    result = subprocess.run(
        [sys.executable, str(file), str(tmp_path / "c")], stderr=subprocess.PIPE, text=True, timeout=120
    )
    assert result.returncode == 0 and "is lost: " in result.stderr and "script.py is a file" in result.stderr
    assert torch.equal(checkpoint.load_full(tmp_path / "c")["w"], torch.ones(10_000_000))


def test_progress(tmp_path):
    seen = []
    checkpoint.save({"w": torch.ones(1000)}, tmp_path / "c", progress=seen.append)
    checkpoint.load({"w": torch.ones(1000)}, tmp_path / "c", progress=seen.append)
    assert {each.phase for each in seen} == {"saving", "verifying", "loading"}
    assert seen[-1] == checkpoint.Progress("loading", 4000, 4000)

    def stop(progress):
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        checkpoint.save({"w": torch.ones(1000)}, tmp_path / "d", progress=stop)
    assert os.listdir(tmp_path) == ["c"]

    @on_ranks(2)
    def on_one():
        with pytest.raises(RuntimeError, match="failed on rank 1: .*stop"):
            checkpoint.load(
                {"w": torch.ones(1000)}, tmp_path / "c", progress=stop if tessera.get_rank() == 1 else None
            )

    on_one()


@on_ranks(4)
def check_writes_are_seen(path):
    mesh = init_device_mesh("cpu", (4,))
    w = distribute_tensor(counted(6, 4), mesh, [Shard(0)])
    checkpoint.save({"w": w}, path)
    w.zero_()
    view = w.view(24)  # of rows that do not lie evenly: a copy, which follows writes
    product = distribute_tensor(torch.ones(6, 4, requires_grad=True), mesh) * w
    checkpoint.load({"w": w}, path)
    assert_full(view, counted(24))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    # And the other way: what is loaded into a view reaches its base.
    w.zero_()
    checkpoint.load({"w": w.view(24).view(6, 4)}, path)
    assert_full(w, counted(6, 4))


def test_writes_are_seen(tmp_path):
    check_writes_are_seen(tmp_path / "c")


def test_partial_values_are_reduced_before_saving(tmp_path):
    @on_ranks(2)
    def save():
        mesh = init_device_mesh("cpu", (2,))
        checkpoint.save({"w": DTensor.from_local(counted(5), mesh, [Partial()])}, tmp_path / "c")

    save()
    assert torch.equal(checkpoint.load_full(tmp_path / "c")["w"], counted(5) * 2)


# What torch.distributed.checkpoint does with our tensors.


@on_ranks(3)
def test_only_distributed_tensors_are_checkpointable():
    x = distribute_tensor(counted(7, 5), init_device_mesh("cpu", (3,)), [Shard(0)])
    for name in ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"):
        assert hasattr(x, name) and hasattr(torch.nn.Parameter(x), name)
        assert not hasattr(x.to_local(), name) and not hasattr(torch.nn.Parameter(torch.ones(1)), name)
    (chunk,) = x.__create_chunk_list__()
    assert chunk.offsets == (3 * tessera.get_rank(), 0) and chunk.sizes == x.to_local().shape
    with pytest.raises(dcp.api.CheckpointException, match="threads of tessera.run"):
        dcp.save({"x": x}, checkpoint_id="nowhere", no_dist=True)
    partial = DTensor.from_local(torch.ones(2), x.device_mesh, [Partial()])
    with pytest.raises(ValueError, match="yet to be reduced"):
        partial.__create_chunk_list__()


def test_their_load_into_our_tensors_on_threads(tmp_path):
    dcp.save({"w": counted(7, 5)}, checkpoint_id=tmp_path / "c")

    @on_ranks(4)
    def load():
        mesh = init_device_mesh("cpu", (2, 2))
        for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)]):
            w = distribute_tensor(torch.zeros(7, 5), mesh, placements)
            dcp.load({"w": w}, checkpoint_id=tmp_path / "c", no_dist=True)
            assert_full(w, counted(7, 5))

    load()


@pytest.mark.parametrize("saver", ("tessera", "torch"))
def test_processes(tmp_path, saver):
    """Saved on 4 processes by one, with its own tensors or the other's, loaded on 2 by both, and here."""
    launch(4, "save", saver, str(tmp_path), worker=WORKER)
    launch(2, "load", saver, str(tmp_path), worker=WORKER)

    @on_ranks(3)
    def load():
        mesh = init_device_mesh("cpu", (3,))
        for path in sorted(tmp_path.iterdir()):
            if path.name == "optimizer":
                continue
            w = distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)])
            state = {"model": {"w": w}, "step": 0}
            checkpoint.load(state, path, strict=False)
            assert_full(w, counted(7, 5))
            assert state["step"] == 3

    load()


def test_processes_whose_group_is_gone(tmp_path):
    launch(2, "alone", "tessera", str(tmp_path), worker=WORKER)


def test_optimizer_of_their_processes(tmp_path):
    """AdamW on torch's own distributed tensors, saved by torch on 4 processes, loaded into ours."""
    launch(4, "save_optimizer", "torch", str(tmp_path), worker=WORKER)
    expected = torch.load(tmp_path / "expected.pt")

    @on_ranks(3)
    def load():
        mesh = init_device_mesh("cpu", (3,))
        model = torch.nn.Linear(6, 5)
        for name, dim in (("weight", 1), ("bias", 0)):
            value = distribute_tensor(getattr(model, name).data, mesh, [Shard(dim)])
            setattr(model, name, torch.nn.Parameter(value))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        for way in ("plain", "helpers"):
            if way == "plain":
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                optimizer.step()
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            else:
                state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
            checkpoint.load(state, tmp_path / way)
            found = state["optimizer"]
            assert found["param_groups"][0]["lr"] == 0.25
            assert found["param_groups"][0]["betas"] == (0.9, 0.999)
            for number, name in enumerate(("weight", "bias")):
                slot = found["state"][number if way == "plain" else name]
                assert slot["step"].item() == 2
                assert_full(slot["exp_avg"], expected[name]["exp_avg"])
                assert_full(slot["exp_avg_sq"], expected[name]["exp_avg_sq"])
                assert_full(state["model"][name].detach(), expected[name]["value"])

    load()


# Models of the transformers package.


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=32,
        use_cache=False,
    )
    return filled(transformers.LlamaForCausalLM(config))


PLAN = {
    "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(),
}


@pytest.mark.parametrize("shards", (False, True))
def test_transformers(tmp_path, shards):
    """From save_pretrained onto a mesh, each rank reading its part; and back through from_pretrained."""
    original = llama()
    original.save_pretrained(tmp_path / "theirs", max_shard_size="20KB" if shards else "1GB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1 or not shards
    size = sum(parameter.nbytes for parameter in original.parameters())
    read = {}

    @on_ranks(4)
    def convert():
        mesh = init_device_mesh("cpu", (4,))
        model = llama()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        parallelize_module(model, mesh, PLAN)
        seen = []
        checkpoint.load(model.state_dict(), tmp_path / "theirs", progress=seen.append)
        read[tessera.get_rank()] = seen[-1].total
        assert isinstance(model.lm_head.weight, DTensor)
        for name, parameter in model.named_parameters():
            full = parameter.detach().full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
            assert torch.equal(full, original.get_parameter(name)), name
        checkpoint.save(
            model.state_dict(),
            tmp_path / "ours",
            format="huggingface",
            file_limit=20_000 if shards else 1 << 30,
        )

    convert()
    assert sum(read.values()) <= 1.1 * size and max(read.values()) < size / 2
    original.config.save_pretrained(tmp_path / "ours")
    if shards:
        index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 1
    again = type(original).from_pretrained(tmp_path / "ours")
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, original.get_parameter(name)), name


def test_their_tensors_in_any_memory_order_and_objects_that_are_not_wanted(tmp_path):
    transposed = torch.arange(12.0).reshape(3, 4).t()
    images = torch.arange(96.0).reshape(2, 3, 4, 4).to(memory_format=torch.channels_last)
    path = tmp_path / "dcp"
    dcp.save({"t": transposed, "c": images, "o": numpy.ones(3)}, checkpoint_id=path)

    def main():
        mesh = init_device_mesh("cpu", (2,))
        state = {
            "t": distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)]),
            "c": distribute_tensor(torch.zeros(2, 3, 4, 4), mesh, [Replicate()]),
        }
        report = checkpoint.load(state, path, strict=False)
        assert report.unexpected == ["o"]
        assert torch.equal(state["t"].full_tensor(), transposed)
        assert torch.equal(state["c"].full_tensor(), images)

    tessera.run(2, main)
    with pytest.raises(RuntimeError, match="Python object of type numpy"):
        checkpoint.load_full(path)
