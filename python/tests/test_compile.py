"""torch.compile leaves distributed tensors alone."""

import warnings

import torch
from ranks import values

import tessera
from tessera import Shard


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
