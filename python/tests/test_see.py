"""Strict, Explain, visualize and Trace."""

import json
import time
import warnings

import pytest
import torch
from ranks import assert_full, on_ranks, values
from tessera.experimental import implicit_replication

import tessera
from tessera import Replicate, Shard, Strict, assert_placements, distribute_tensor, init_device_mesh
from tessera.debug import CommDebugMode, Explain, Trace, explain, visualize


def operands(mesh):
    x = distribute_tensor(values(4, 4), mesh, [Shard(0)])
    return x, distribute_tensor(values(4, 4), mesh, [Shard(1)])


@on_ranks()
def test_strict_shows_call_and_code():
    mesh = init_device_mesh("cpu", (4,))
    x, y = operands(mesh)
    with Strict(), pytest.raises(RuntimeError) as raised:
        x + y
    message = str(raised.value)
    assert "aten::add.Tensor(f32[4,4] [S(0)], f32[4,4] [S(1)]) on mesh(4)" in message
    assert "all_to_all" in message and "/rank" in message
    assert "other = other.redistribute(placements=[Shard(dim=0)])" in message
    with Strict():
        assert_full(x + y.redistribute(placements=[Shard(dim=0)]), 2 * values(4, 4))


@on_ranks()
def test_strict_counts_by_place():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    x, y = operands(mesh)
    with Strict("count") as strict:
        for _ in range(3):
            x + y
        x + y
    assert strict.calls == 4 and len(strict.moves) == 2
    assert [move["calls"] for move in strict.moves] == [3, 1]
    assert strict.bytes == sum(move["bytes"] for move in strict.moves) > 0
    locations = [move["location"] for move in strict.moves]
    assert all("test_see.py:" in location for location in locations) and locations[0] != locations[1]
    assert "3 times" in str(strict)
    with Strict(above="1 MiB"), Strict(mesh_dims=["tp"]):
        x + y
    with Strict("forbid", above=1, mesh_dims=["dp"]), pytest.raises(RuntimeError):
        x + y


def test_strict_warns_once_per_line():
    def main():
        x, y = operands(init_device_mesh("cpu", (2,)))
        with Strict("warn"):
            for _ in range(3):
                x + y

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tessera.run(2, main)
    assert len([each for each in caught if "aten::add.Tensor" in str(each.message)]) == 2  # one on each rank


@on_ranks()
def test_strict_of_one_module():
    mesh = init_device_mesh("cpu", (4,))
    x, y = operands(mesh)

    class Sum(torch.nn.Module):
        def forward(self, a, b):
            return a + b

    module = Sum()
    handle = Strict().watch(module)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="aten::add"):
            module(x, y)
        x + y  # only inside of it
    module(x, x)
    handle.remove()
    module(x, y)


def test_strict_refuses_nonsense():
    with pytest.raises(ValueError, match="level"):
        Strict("maybe")
    with pytest.raises(ValueError, match="1 MiB"):
        Strict(above="1 parsec")
    with pytest.raises(ValueError, match="-1 bytes"), Strict(above=-1):
        pass


@on_ranks()
def test_assert_placements():
    mesh = init_device_mesh("cpu", (4,))
    x, _ = operands(mesh)
    assert_placements(x, [Shard(-2)])
    with pytest.raises(ValueError, match=r"x = x.redistribute\(placements=\[Replicate\(\)\]\)"):
        assert_placements(x, [Replicate()])
    with pytest.raises(ValueError, match="plain"):
        assert_placements(values(2), [Replicate()])


def test_explain_needs_no_ranks():
    text = explain("mm(f32[4096,4096] [S(0),R], f32[4096,4096] [R,S(1)])", mesh="dp=8,tp=8")
    assert "result: f32[4096,4096] [S(0),S(1)]" in text and "nothing moves between ranks" in text
    with pytest.raises(ValueError, match=r"\^"):
        explain("mm(f32[4,4] [X])", mesh="2")


@on_ranks()
def test_explain_of_a_block():
    mesh = init_device_mesh("cpu", (4,))
    x, y = operands(mesh)
    with Explain() as explanation, implicit_replication():
        torch.nn.functional.gelu(x + y)
    text = str(explanation)
    assert "aten::add.Tensor" in text and "aten::gelu" in text and "all_to_all" in text


@on_ranks()
def test_visualize():
    mesh = init_device_mesh("cpu", (4,))
    x, _ = operands(mesh)
    text = visualize(x, format="text")
    assert text == visualize("[S(0)] on mesh(4): f32[4, 4]", format="text")
    assert "0:1 │" in text
    assert "all_gather" in visualize(x, [Replicate()], format="text")
    assert visualize(x, format="svg").startswith("<svg")
    with pytest.raises(ValueError, match="png"):
        visualize(x, format="png")


def test_visualize_writes_files(tmp_path):
    page = visualize("[S(0)] on mesh(4): f32[4, 4]", "[R]", file=tmp_path / "x.html")
    assert (tmp_path / "x.html").read_text() == page and page.startswith("<!doctype html>")


def test_trace(tmp_path):
    def main():
        mesh = init_device_mesh("cpu", (2,))
        x, y = operands(mesh)
        x.requires_grad_()
        with Trace() as trace:
            if tessera.get_rank() == 1:
                time.sleep(0.1)
            (x + y).sum().backward()
        trace.write(tmp_path / "trace.json")
        assert "for rank 1" in trace.summary()

    tessera.run(2, main)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert any(event.get("cat") == "operator,backward" for event in events)


@on_ranks()
def test_comm_debug_mode_has_bytes_operators_and_groups():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = distribute_tensor(values(4, 4), mesh, [Replicate(), Shard(0)])
    y = distribute_tensor(values(4, 4), mesh, [Replicate(), Shard(1)])
    with CommDebugMode() as mode:
        x.redistribute(placements=[Replicate(), Replicate()])
        x + y
    asked, own = mode.comm_records
    assert asked["collective"] == "all_gather" and asked["operator"] == "" and asked["bytes"] == 64
    assert own["collective"] == "all_to_all" and own["operator"] == "aten::add.Tensor"
    assert asked["group"] == own["group"] == ((0, 1) if tessera.get_rank() < 2 else (2, 3))
    assert mode.get_total_bytes() == asked["bytes"] + own["bytes"]
    assert mode.get_total_bytes(implicit=False) == 64
    assert asked["mesh_dim"] == own["mesh_dim"] == "tp"
    assert (
        mode.get_total_bytes(mesh_dim="tp") == mode.get_total_bytes()
        and mode.get_total_bytes(mesh_dim="dp") == 0
    )
