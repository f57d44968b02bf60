"""torch.optim and gradient clipping on distributed parameters, against one device."""

import pytest
import torch
from ranks import assert_full, meshes, on_ranks, placements_of, values

import tessera
from tessera import Replicate, Shard

OPTIMISERS = {
    "SGD": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        ("for-loop", "foreach", "fused"),
    ),
    "Adam": (torch.optim.Adam, {"lr": 0.1}, ("for-loop", "foreach", "fused")),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}, ("for-loop", "foreach", "fused")),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}, ("for-loop", "foreach", "fused")),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "centered": True}, ("for-loop", "foreach")),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.1}, ("for-loop", "foreach")),
    "Adamax": (torch.optim.Adamax, {"lr": 0.1}, ("for-loop", "foreach")),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1}, ("for-loop", "foreach")),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1}, ("for-loop", "foreach")),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}, ("for-loop", "foreach")),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1}, ("for-loop", "foreach")),
    "LBFGS": (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 4}, ("for-loop",)),
    "Muon": (torch.optim.Muon, {"lr": 0.1}, ("for-loop",)),
}
CASES = [(name, way) for name, (_, _, ways) in OPTIMISERS.items() for way in ways]


def step(optimiser, weights, bias, steps):
    def closure():
        optimiser.zero_grad()
        loss = sum(((weight * 2 - 1) ** 2).sum() for weight in weights)
        if bias is not None:
            loss = loss + (bias**2).sum()
        loss.backward()
        return loss

    for _ in range(steps):
        optimiser.step(closure)


@pytest.mark.parametrize("name, way", CASES)
@on_ranks()
def test_optimisers(name, way):
    kind, options, _ = OPTIMISERS[name]
    extra = {} if way == "for-loop" else {way: True}
    if way == "for-loop" and name not in ("LBFGS", "Muon"):
        extra = {"foreach": False}
    for mesh in meshes():
        full = [values(5, 3), values(4, 6, seed=1)]
        plain = [value.clone().requires_grad_() for value in full]
        distributed = [
            torch.nn.Parameter(tessera.distribute_tensor(full[0], mesh, [Shard(0)] * mesh.ndim)),
            torch.nn.Parameter(
                tessera.distribute_tensor(full[1], mesh, [Shard(1)] + [Replicate()] * (mesh.ndim - 1))
            ),
        ]
        bias = None if name == "Muon" else values(7)
        plain_bias = None if bias is None else bias.clone().requires_grad_()
        bias = None if bias is None else torch.nn.Parameter(tessera.distribute_tensor(bias, mesh))
        for weights, b in ((plain, plain_bias), (distributed, bias)):
            step(kind([*weights, *([] if b is None else [b])], **options, **extra), weights, b, 5)
        for ours, theirs in zip(distributed, plain):
            tolerance = 0.2 if name == "Muon" else 2e-3  # Muon computes in bfloat16
            assert_full(ours.detach(), theirs.detach(), rtol=tolerance, atol=tolerance / 20)
        if bias is not None:
            assert_full(bias.detach(), plain_bias.detach(), rtol=2e-3, atol=1e-4)
        assert distributed[0].placements == (Shard(0),) * mesh.ndim


@on_ranks()
def test_the_state_is_placed_as_its_parameter_and_is_kept():
    for mesh in meshes():
        parameter = torch.nn.Parameter(tessera.distribute_tensor(values(5, 3), mesh, [Shard(0)] * mesh.ndim))
        optimiser = torch.optim.AdamW([parameter], lr=0.1)
        step(optimiser, [parameter], None, 2)
        state = optimiser.state[parameter]
        assert state["exp_avg"].placements == parameter.placements
        again = torch.optim.AdamW([parameter], lr=0.1)
        again.load_state_dict(optimiser.state_dict())
        assert_full(again.state[parameter]["exp_avg"], state["exp_avg"].full_tensor())
        step(again, [parameter], None, 1)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("norm", [1.0, 2.0, 3.0, float("inf")])
@on_ranks()
def test_gradient_clipping(norm, foreach):
    for mesh in meshes():
        for placements in placements_of(values(5, 3), mesh, partial=False):
            plain = [values(5, 3).requires_grad_(), values(4, seed=1).requires_grad_()]
            ours = [
                tessera.distribute_tensor(values(5, 3), mesh, placements).requires_grad_(),
                tessera.distribute_tensor(values(4, seed=1), mesh).requires_grad_(),
            ]
            for parameters in (plain, ours):
                sum((parameter**3).sum() for parameter in parameters).backward()
            expected = torch.nn.utils.clip_grad_norm_(plain, 0.5, norm, foreach=foreach)
            assert_full(torch.nn.utils.clip_grad_norm_(ours, 0.5, norm, foreach=foreach), expected)
            torch.nn.utils.clip_grad_value_(plain, 0.05, foreach=foreach)
            torch.nn.utils.clip_grad_value_(ours, 0.05, foreach=foreach)
            for a, b in zip(ours, plain):
                assert_full(a.grad, b.grad)


@on_ranks()
def test_gradient_scaling():
    mesh = tessera.init_device_mesh("cpu", (4,))
    parameter = torch.nn.Parameter(tessera.distribute_tensor(values(5, 3), mesh, [Shard(0)]))
    plain = values(5, 3).requires_grad_()
    for each in (parameter, plain):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimiser = torch.optim.SGD([each], lr=0.1)
        scaler.scale((each**2).sum()).backward()
        scaler.step(optimiser)
        scaler.update()
    assert_full(parameter.detach(), plain.detach())
