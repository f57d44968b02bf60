"""Random chains of views, writes and operators on random placements, against one device: after each step all tensors that are alive, in the end
gradients.

``TESSERA_CHAINS=5000 pytest python/tests/test_chains.py`` tries more of them."""

import math
import os
import random

import pytest
import torch
from oracle import random_placements

import tessera

CHAINS = int(os.environ.get("TESSERA_CHAINS", "120"))
MESHES = [(4,), (2, 2), (3,)]


class Step:
    """What is done to ``t``; ``o`` are other values of its shape, ``m`` is a mask, ``i(...)`` an index."""

    def __init__(self, text):
        self.text = text

    def __call__(self, t, o, m, i):
        return eval(self.text, {"torch": torch, "t": t, "o": o, "m": m, "i": i})


def views(rng, shape):
    ndim = len(shape)
    if ndim == 0:
        return Step(rng.choice(["t.unsqueeze(0)", "t.view(1)", "t.expand(2)"]))
    a, b = rng.randrange(ndim), rng.randrange(ndim)
    size, before = shape[a], ":, " * a
    begin = rng.randint(0, size)
    order = rng.sample(range(ndim), ndim)
    texts = [
        f"t[{before}{begin}:{rng.randint(begin, size + 1)}:{rng.choice([1, 1, 2, 3])}]",
        f"t.transpose({a}, {b})",
        f"t.unsqueeze({rng.randint(-ndim - 1, ndim)})",
        f"t.permute({order})",
        "t.squeeze()",
        f"t.expand({[rng.choice([1, 3]) if n == 1 else n for n in shape]})",
        "t.view_as(t)",
    ]
    if size > 0:
        texts.append(f"t.select({a}, {rng.randrange(-size, size)})")
    texts += [f"t.unflatten({a}, ({k}, {size // k}))" for k in (2, 3) if size > 1 and size % k == 0]
    if a != b:
        texts.append(f"t.diagonal({rng.choice([0, 1, -1])}, {a}, {b})")
    return Step(rng.choice(texts))


def writes(rng, shape):
    texts = [
        "t.mul_(1.5)",
        "t.add_(0.25)",
        "t.fill_(0.5)",
        "t.copy_(o)",
        "t.sub_(o, alpha=0.5)",
        "t.neg_()",
        "t.tanh_()",
        "t.masked_fill_(m, 0.3)",
    ]
    texts += [
        "t.lerp_(o, 0.3)",
        "t.__setitem__(m, 0.7)",
        "t.__setitem__(m, o[m])",
        "t.__setitem__(..., o)",
        "t.masked_scatter_(m, o)",
    ]
    if shape and min(shape) > 0:
        dim = rng.randrange(len(shape))
        before, some = ":, " * dim, rng.sample(range(shape[dim]), rng.randint(1, shape[dim]))
        key = f"({'slice(None), ' * dim}{some[0]},)"
        texts += [
            f"t.index_add_({dim}, i({some}), o.index_select({dim}, i({some})))",
            f"t.index_copy_({dim}, i({some}), o.index_select({dim}, i({some})))",
            f"t.__setitem__({key}, o[{before}0])",
            f"t.select({dim}, {some[0]}).mul_(2)",
            f"t.cumsum_({dim})",
        ]
        texts += ["t.tril_()"] if len(shape) > 1 else []
    return Step(rng.choice(texts))


def operators(rng, shape):
    texts = [
        "t * 2",
        "t + o",
        "torch.tanh(t)",
        "t.clone()",
        "t.sum()",
        "torch.where(m, t, o)",
        "t * o",
        "t[m]",
        "t.norm() - o.norm()",
        "t.reshape(-1).clone()",
    ]
    texts += ["torch.stack([t.norm(), o.sum()])", "(t != 0).nonzero().to(t.dtype)"]
    if shape:
        dim, keep = rng.randrange(len(shape)), rng.choice([True, False])
        size = shape[dim]
        texts += [
            f"t.sum({dim}, keepdim={keep})",
            f"t.cumsum({dim})",
            f"t.flip({dim})",
            f"t.roll({rng.randint(-3, 3)}, {dim})",
        ]
        texts += [f"torch.stack([t, o], {dim})", "torch.nn.functional.pad(t, (1, 2))"]
        # libtorch makes the gradient of what is [0] in cat a plain tensor.
        texts += [f"torch.cat([t, o], {dim})"] if min(shape) > 0 else []
        if min(shape) > 0:
            some = [rng.randrange(size) for _ in range(3)]
            texts += [f"t.{name}({dim}, keepdim={keep})" for name in ("mean", "amax", "logsumexp", "prod")]
            texts += [
                f"t.softmax({dim})",
                f"t.index_select({dim}, i({some}))",
                f"t.sort({dim})[0]",
                f"t.topk(1, {dim})[0]",
                f"t.max({dim})[0]",
            ]
            texts += [f"t.argmax({dim}).to(t.dtype) + t.sum({dim})", f"t.cummax({dim})[0]"]
        if len(shape) > 1:
            texts += ["t @ o.mT", "t.mT @ o", "torch.tril(t)"]
    return Step(rng.choice(texts))


def chain(seed, mesh, log, gradients):
    """Of this seed; ``log``: what was done."""
    rng = random.Random(seed)
    op = ["max", "min", "product", "avg"][seed % 4]
    shape = [rng.choice([1, 2, 3, 4, 5, 6, 7, 8]) for _ in range(rng.choice([1, 2, 2, 3]))]
    if rng.random() < 0.05:
        shape[0] = 0

    def distributed(full, op=None):
        return tessera.distribute_tensor(
            full, mesh, random_placements(rng, full.dim(), mesh.ndim, ["sum", op] if op else [])
        )

    full = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    leaf = distributed(full, op)
    log.append(f"{shape} on {mesh.shape}: {leaf.placements}")
    if gradients:
        full.requires_grad_()
        leaf.requires_grad_()
    alive = [(leaf * 1, full * 1, True)]  # and whether it may be written: not if elements of it share memory
    for number in range(rng.randint(3, 9)):
        t, plain, writable = rng.choice(alive)
        make = rng.choices([views, writes, operators], [9, 6 if writable else 0, 5])[0]
        step = make(rng, plain.shape)
        other = torch.randn(
            plain.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed * 31 + number)
        )
        mask = other > 0.2
        others = distributed(other, op), distributed(mask)
        try:
            expected = step(plain, other, mask, torch.tensor)
        except (RuntimeError, IndexError):  # what one device refuses may have been half done
            return
        log.append(f"{tuple(plain.shape)} {step.text}   with {others[0].placements} {others[1].placements}")
        actual = step(t, *others, lambda positions: tessera.distribute_tensor(torch.tensor(positions), mesh))
        if make is not writes:
            if expected.numel() > 3000:
                return
            alive = [
                *alive[-4:],
                (actual, expected, make is operators or (writable and "expand" not in step.text)),
            ]
        for a, b, _ in alive:
            torch.testing.assert_close(
                a.full_tensor(), b, rtol=1e-6, atol=1e-8, equal_nan=True, msg=lambda m: f"{m}\n{a.placements}"
            )
    if not gradients or not any(plain.requires_grad for _, plain, _ in alive):
        return
    mine, theirs = (
        sum((pair[side] ** 2).sum() for pair in alive if pair[1].requires_grad) for side in (0, 1)
    )
    try:
        theirs.backward()
    except RuntimeError:  # something that is needed was written into
        return
    mine.backward()
    log.append("backward")
    torch.testing.assert_close(leaf.grad.full_tensor(), full.grad, rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_equal_one_device(gradients):
    for seed in range(CHAINS):
        shape = MESHES[seed % len(MESHES)]
        log = []

        def on_a_rank():
            mesh = tessera.init_device_mesh("cpu", shape)
            chain(seed, mesh, log if tessera.get_rank() == 0 else [], gradients)

        try:
            tessera.run(math.prod(shape), on_a_rank)
        except Exception as error:
            pytest.fail(f"seed {seed}: {error}\n" + "\n".join(log))
