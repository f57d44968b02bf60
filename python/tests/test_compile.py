"""torch.compile leaves distributed tensors alone, and only them."""

import warnings

import pytest
import torch
from ranks import values
from tessera.experimental import local_map
from tessera.parallel import ColwiseParallel, parallelize_module

import tessera
from tessera import Replicate, Shard


def test_compiled_code_that_touches_distributed_tensors_runs_eagerly_and_is_right():
    compiled_graphs = []

    def backend(graph, example_inputs):
        compiled_graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def function(x, y):
        return (torch.sin(x) @ y).relu() * 2

    weight = None

    @torch.compile(backend=backend)
    def with_global(x):
        return x @ weight

    def main():
        nonlocal weight
        mesh = tessera.init_device_mesh("cpu", (1,))
        x = tessera.distribute_tensor(values(4, 4), mesh, [Shard(0)]).requires_grad_()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = function(x, x)
            function(x, x)
            weight = x.detach()
            other = with_global(x)
        ours = [warning for warning in caught if "tessera" in str(warning.message)]
        assert len(ours) == 1 and "eager" in str(ours[0].message)
        assert isinstance(result, tessera.DTensor) and isinstance(other, tessera.DTensor)
        expected = (torch.sin(values(4, 4)) @ values(4, 4)).relu() * 2
        torch.testing.assert_close(result.full_tensor(), expected)
        torch.testing.assert_close(other.full_tensor(), values(4, 4) @ values(4, 4))
        result.sum().backward()
        plain = values(4, 4).requires_grad_()
        ((torch.sin(plain) @ plain).relu() * 2).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
        assert not compiled_graphs

    tessera.run(1, main)

    @torch.compile(backend=backend)
    def of_plain(x):
        return torch.sin(x) @ x

    torch.testing.assert_close(of_plain(values(4, 4)), torch.sin(values(4, 4)) @ values(4, 4))
    assert len(compiled_graphs) == 1


class Graphs(list):
    """A backend that keeps what was compiled, by the names of operators."""

    def __call__(self, graph, example_inputs):
        self.append([node.name for node in graph.graph.nodes if node.op not in ("placeholder", "output")])
        return graph.forward


def on_one_rank(function):
    tessera.run(1, function)


def test_a_function_stays_compiled_for_plain_tensors():
    graphs = Graphs()

    @torch.compile(backend=graphs)
    def function(x, others):
        return torch.sin(x) + others["y"]

    @on_one_rank
    def main():
        mesh = tessera.init_device_mesh("cpu", (1,))
        x = tessera.distribute_tensor(values(4, 4), mesh, [Shard(0)])
        for each in (x, values(4, 4), x, values(4, 4)) * 3:  # whichever comes first
            result = function(each, {"y": each})
            assert isinstance(result, tessera.DTensor) == isinstance(each, tessera.DTensor)
        assert graphs == [["sin", "add"]]


def test_regions_of_local_map_are_compiled():
    graphs = Graphs()

    @local_map(out_placements=[Shard(0)], in_placements=([Shard(0)], [Replicate()]))
    def region(x, y):
        return torch.sin(x) @ y

    @torch.compile(backend=graphs)
    def function(x, y):
        return region(x * 2, y) + 1

    @on_one_rank
    def main():
        mesh = tessera.init_device_mesh("cpu", (1,))
        x = tessera.distribute_tensor(values(4, 4), mesh, [Shard(0)]).requires_grad_()
        y = tessera.distribute_tensor(values(4, 4, seed=1), mesh, [Replicate()])
        plain = values(4, 4).requires_grad_()
        expected = torch.sin(plain * 2) @ values(4, 4, seed=1) + 1
        expected.sum().backward()
        for _ in range(3):
            x.grad = None
            result = function(x, y)
            result.sum().backward()
            torch.testing.assert_close(result.full_tensor(), expected)
            torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
        assert graphs == [["sin", "matmul"]]


def test_what_is_plain_in_a_parallel_model_is_compiled():
    """Between its layers there are plain tensors."""
    graphs = Graphs()

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layer, self.last = (
                torch.nn.LayerNorm(4),
                torch.nn.Linear(4, 4),
                torch.nn.LayerNorm(4),
            )

        def forward(self, x):
            return self.last(torch.relu(self.layer(self.first(x) * 2)) + 1)

    @on_one_rank
    def main():
        mesh = tessera.init_device_mesh("cpu", (1,))
        block = parallelize_module(Block(), mesh, {"layer": ColwiseParallel()})
        compiled = torch.compile(block, backend=graphs)
        for _ in range(3):
            torch.testing.assert_close(compiled(values(2, 4)), block(values(2, 4)))
        assert len(graphs) == 2 and "relu" in graphs[1]


def test_a_full_graph_with_distributed_tensors_is_refused():
    graphs = Graphs()

    @torch.compile(backend=graphs, fullgraph=True)
    def function(x):
        return x * 2

    @on_one_rank
    def main():
        mesh = tessera.init_device_mesh("cpu", (1,))
        function(values(3))
        with pytest.raises(RuntimeError, match="fullgraph"):
            function(tessera.distribute_tensor(values(3), mesh, [Shard(0)]))
        function(values(3))
        assert len(graphs) == 1
