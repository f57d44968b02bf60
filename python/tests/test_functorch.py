"""torch.func, torch.autograd.functional and forward-mode AD on distributed tensors: equal to one device."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from ranks import on_ranks, values
from tessera.experimental import implicit_replication
from torch import func
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

import tessera
from tessera import Partial, Replicate, Shard, distribute_tensor

Function = Callable[[torch.Tensor, torch.Tensor], Any]


def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight).sum()


def hidden(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight)


def batched_grad(x: torch.Tensor, w: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    y = hidden(x, w).sum(0)
    each = torch.eye(y.shape[0], dtype=x.dtype)
    if isinstance(x, tessera.DTensor):
        each = distribute_tensor(each, x.device_mesh, [Replicate()] * x.device_mesh.ndim)
    return torch.autograd.grad(y, x, each, is_grads_batched=True)


def dual(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        made = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(hidden(made, w)).tangent


TRANSFORMS: dict[str, Function] = {
    "grad": lambda x, w: func.grad(lambda x: (torch.sin(x) @ w).pow(2).sum())(x),
    "grad_and_value": lambda x, w: func.grad_and_value(lambda x: (x @ w).exp().mean())(x),
    "grad of grad": lambda x, w: func.grad(lambda x: func.grad(lambda y: loss(w, y))(x).pow(2).sum())(x),
    "vjp": lambda x, w: func.vjp(lambda x: hidden(x, w), x)[1](torch.ones_like(x @ w)),
    "jvp": lambda x, w: func.jvp(lambda x: hidden(x, w), (x,), (torch.ones_like(x),)),
    "linearize": lambda x, w: func.linearize(lambda x: hidden(x, w), x)[1](torch.ones_like(x)),
    "jacrev": lambda x, w: func.jacrev(lambda x: hidden(x, w).sum(0))(x),
    "jacrev in chunks": lambda x, w: func.jacrev(lambda x: hidden(x, w).sum(0), chunk_size=2)(x),
    "jacfwd": lambda x, w: func.jacfwd(lambda x: hidden(x, w).sum(0))(x),
    "hessian": lambda x, w: func.hessian(lambda x: hidden(x, w).sum())(x),
    "vmap": lambda x, w: func.vmap(lambda row: torch.softmax(row, 0) @ w)(x),
    "vmap of columns": lambda x, w: func.vmap(lambda column: column.cumsum(0), in_dims=1, out_dims=1)(x),
    "vmap in chunks": lambda x, w: func.vmap(lambda row: row @ w, chunk_size=3)(x),
    "vmap of two": lambda x, w: func.vmap(torch.dot)(x, x.flip(0)),
    "vmap of vmap": lambda x, w: func.vmap(func.vmap(lambda each: each * 2 + 1))(x),
    "vmap in place": lambda x, w: func.vmap(lambda row: row.clone().add_(1).mul_(row))(x),
    "vmap of views": lambda x, w: func.vmap(lambda row: torch.cat([row[1:3], row.flip(0)]))(x),
    "vmap of weights": lambda x, w: func.vmap(lambda w: x @ w)(torch.stack([w, w * 2])),
    "vmap of layers": lambda x, w: func.vmap(
        lambda row: torch.nn.functional.linear(torch.nn.functional.layer_norm(row, (5,)), w.t())
    )(x),
    "gradients of each sample": lambda x, w: func.vmap(func.grad(loss), in_dims=(None, 0))(w, x),
    "functional_call": lambda x, w: func.functional_call(
        torch.nn.Linear(5, 4, dtype=torch.float64), {"weight": w.t(), "bias": w.sum(0)}, (x,)
    ),
    "jacobian": lambda x, w: torch.autograd.functional.jacobian(lambda x: hidden(x, w).sum(0), x),
    "vectorized jacobian": lambda x, w: torch.autograd.functional.jacobian(
        lambda x: hidden(x, w).sum(0), x, vectorize=True
    ),
    "autograd's hessian": lambda x, w: torch.autograd.functional.hessian(lambda x: hidden(x, w).sum(), x),
    "is_grads_batched": batched_grad,
    "dual numbers": dual,
}


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, tessera.DTensor) else value


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_equal_one_device(name: str) -> None:
    x, w = values(6, 5, dtype=torch.float64), values(5, 4, seed=1, dtype=torch.float64)
    check_on_ranks(name, x, w, tree_leaves(TRANSFORMS[name](x, w)))


@on_ranks()
def check_on_ranks(name: str, x: torch.Tensor, w: torch.Tensor, expected: list[torch.Tensor]) -> None:
    transform = TRANSFORMS[name]
    placed = [Shard(0), Shard(1), Replicate(), Partial()]
    for mesh in (tessera.init_device_mesh("cpu", (4,)), tessera.init_device_mesh("cpu", (2, 2))):
        cases = [(a, b) for a in placed for b in placed]
        for of_x, of_w in random.Random(name).sample(cases, 6):
            where_x = [of_x, *[Shard(1)] * (mesh.ndim - 1)]
            where_w = [of_w, *[Replicate()] * (mesh.ndim - 1)]
            x_placed, w_placed = distribute_tensor(x, mesh, where_x), distribute_tensor(w, mesh, where_w)
            got = tree_leaves(transform(x_placed, w_placed))
            assert len(got) == len(expected)
            for ours, theirs in zip(got, expected, strict=True):
                assert isinstance(ours, tessera.DTensor), (name, where_x, where_w)
                torch.testing.assert_close(ours.full_tensor(), theirs)


def every_result(output: Any) -> torch.Tensor:
    return sum(each.sum() for each in tree_leaves(output) if each.is_floating_point())  # type: ignore[return-value]


BY_OPERATOR: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "vmap": lambda op, x: func.vmap(op)(torch.stack([x, x.flip(0) * 0.5])),
    "grad": lambda op, x: func.grad(lambda x: every_result(op(x)))(x),
    "jvp": lambda op, x: func.jvp(op, (x,), (torch.ones_like(x),)),
}

#: Random numbers are those of tessera.random, not of one device.
RANDOM = {
    "multinomial",
    "normal",
    "bernoulli",
    "rrelu",
    "uniform",
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
}

#: A distributed tensor has no storage to be a part of, no memory to change, and is dense.
WITHOUT = {"as_strided", "as_strided_copy", "as_strided_scatter", "resize_", "resize_as_", "to_sparse"}


@pytest.mark.parametrize("transform", BY_OPERATOR)
def test_transforms_of_operators_equal_one_device(transform: str) -> None:
    """A sample of PyTorch's operators. Where torch makes plain tensors inside of a transform, an error says what to do."""
    apply = BY_OPERATOR[transform]
    tried = 0
    rng = random.Random(transform)
    for op in rng.sample(op_db, 80):
        words = set(op.name.split("."))
        if words & (WITHOUT | RANDOM) or "dropout" in op.name or torch.float64 not in op.dtypes:
            continue
        samples = [
            sample
            for sample in op.sample_inputs("cpu", torch.float64, requires_grad=False)
            if isinstance(sample.input, torch.Tensor)
            and sample.input.dtype == torch.float64
            and sample.input.ndim > 0
            and 0 < sample.input.numel() < 200
        ]
        if not samples:
            continue
        sample = rng.choice(samples)

        def run(x: Any, args: Any, kwargs: Any, op: Any = op) -> list[Any]:
            return tree_leaves(apply(lambda x: op.op(x, *args, **kwargs), x))

        try:
            expected, again = (run(sample.input, sample.args, sample.kwargs) for _ in range(2))
        except Exception:  # noqa: BLE001, S112: torch cannot do it on one device either
            continue
        if not all(
            torch.equal(a, b) for a, b in zip(expected, again, strict=True) if isinstance(a, torch.Tensor)
        ):
            continue  # random in another way, or not a number
        dim = rng.randrange(sample.input.ndim)

        def on_rank(sample: Any = sample, dim: int = dim, run: Any = run) -> list[Any]:
            mesh = tessera.init_device_mesh("cpu", (2,))
            x = distribute_tensor(sample.input, mesh, [Shard(dim)])
            args, kwargs = tree_map(
                lambda each: (
                    distribute_tensor(each, mesh, [Replicate()]) if isinstance(each, torch.Tensor) else each
                ),
                (sample.args, sample.kwargs),
            )
            try:
                return [full(each) for each in run(x, args, kwargs)]
            except ValueError as error:
                assert "implicit_replication" in str(error)
            with implicit_replication():
                return [full(each) for each in run(x, args, kwargs)]

        for got in tessera.run(2, on_rank, timeout=60):
            torch.testing.assert_close(
                got, expected, msg=lambda text, op=op: f"{transform} of {op.name}: {text}"
            )
        tried += 1
    assert tried > 30
