"""A distributed tensor is a torch.Tensor: what Python code does with tensors works on it."""

import copy
import io
import pickle
import weakref

import pytest
import torch
from ranks import assert_full, meshes, on_ranks, placements_of, values
from torch.utils.checkpoint import checkpoint

import tessera
from tessera import DTensor, Partial, Replicate, Shard


@on_ranks()
def test_every_result_is_known_to_be_distributed():
    for mesh in meshes():
        x = tessera.distribute_tensor(values(6, 5), mesh, [Shard(0)] * mesh.ndim)
        for result in (
            x,
            x + 1,
            x @ x.T,
            x.sum(),
            x[0],
            x.view(30),
            torch.nn.Parameter(x),
            x.detach(),
            *x.unbind(1),
            *x.max(0),
            x.data,
        ):
            assert isinstance(result, DTensor)
            assert isinstance(result, torch.Tensor)
            assert result.device_mesh == mesh
        for other in (values(2), x.to_local(), x.full_tensor(), 3, None, "x"):
            assert not isinstance(other, DTensor)


def test_plain_tensors_do_not_have_the_attributes():
    plain = values(3)
    for tensor in (plain, torch.nn.Parameter(plain)):
        for name in ("placements", "device_mesh", "to_local", "full_tensor", "redistribute"):
            assert not hasattr(tensor, name)
            with pytest.raises(AttributeError, match=name):
                getattr(tensor, name)


def test_the_class_says_how_to_make_one():
    with pytest.raises(TypeError, match="distribute_tensor"):
        DTensor(values(3))


@on_ranks()
def test_repr_shows_what_this_rank_holds():
    mesh = tessera.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = tessera.distribute_tensor(torch.arange(4.0), mesh, [Shard(0), Replicate()])
    mine = "tensor([0., 1.])" if mesh.get_coordinate()[0] == 0 else "tensor([2., 3.])"
    expected = (
        f"DTensor(local_tensor={mine}, shape=(4,), device_mesh=DeviceMesh(dp=2, tp=2, 'cpu', ranks=[0, 1, 2, 3]), "
        "placements=(Shard(dim=0), Replicate())"
    )
    assert repr(x) == str(x) == expected + ")"
    assert repr(x.requires_grad_()) == expected + ", requires_grad=True)"
    assert "grad_fn=<MulBackward0>" in repr(x * 2)
    assert repr(torch.nn.Parameter(x.detach())).startswith("Parameter containing:\nDTensor(")


@on_ranks()
def test_copies_and_pickles():
    for mesh in meshes():
        full = values(5, 3)
        for placements in placements_of(full, mesh):
            x = tessera.distribute_tensor(full, mesh, placements)
            x.note = "kept"
            deep, shallow, pickled = copy.deepcopy(x), copy.copy(x), pickle.loads(pickle.dumps(x))
            for copied in (deep, shallow, pickled):
                assert copied.placements == placements and copied.device_mesh == mesh
                assert copied.note == "kept"
                assert_full(copied, full)
            x.to_local().zero_()
            assert_full(deep, full)
            assert_full(shallow, torch.zeros_like(full))


@on_ranks()
def test_deepcopy_keeps_gradients_and_shared_tensors():
    mesh = tessera.init_device_mesh("cpu", (4,))
    x = tessera.distribute_tensor(values(5, 3), mesh, [Shard(0)]).requires_grad_()
    (x * x).sum().backward()
    first, second = copy.deepcopy([x, x])
    assert first is second and first.requires_grad and first.is_leaf
    assert_full(first.grad, 2 * values(5, 3))
    with pytest.raises(RuntimeError, match="leaves"):
        copy.deepcopy(x * 2)


@on_ranks()
def test_save_and_load():
    for mesh in meshes():
        module = torch.nn.Linear(6, 5)
        full = {name: values(*parameter.shape) for name, parameter in module.named_parameters()}
        module.weight = torch.nn.Parameter(
            tessera.distribute_tensor(full["weight"], mesh, [Shard(1)] * mesh.ndim)
        )
        module.bias = torch.nn.Parameter(
            tessera.distribute_tensor(full["bias"], mesh, [Replicate()] * mesh.ndim)
        )
        for weights_only in (True, False):
            file = io.BytesIO()
            torch.save({"model": module.state_dict(), "whole": module.weight}, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=weights_only)
            assert isinstance(loaded["whole"], torch.nn.Parameter) and loaded["whole"].requires_grad
            assert_full(loaded["whole"].data, full["weight"])
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.zero_()
            module.load_state_dict(loaded["model"])
            for name, parameter in module.named_parameters():
                assert_full(parameter.data, full[name])
            module.load_state_dict(loaded["model"], assign=True)
            assert_full(module.weight.data, full["weight"])
            assert module.weight.placements == (Shard(1),) * mesh.ndim


@on_ranks()
def test_hooks():
    mesh = tessera.init_device_mesh("cpu", (4,))
    x = tessera.distribute_tensor(values(5, 3), mesh, [Shard(0)]).requires_grad_()
    seen = []
    x.register_hook(lambda grad: seen.append("hook") or grad * 2)
    x.register_post_accumulate_grad_hook(lambda tensor: seen.append("accumulated"))
    module = torch.nn.Identity()
    module.register_forward_hook(lambda module, arguments, output: seen.append(isinstance(output, DTensor)))
    module(x * 3).sum().backward()
    assert seen == [True, "hook", "accumulated"]
    assert_full(x.grad, torch.full((5, 3), 6.0))


@on_ranks()
def test_modes():
    mesh = tessera.init_device_mesh("cpu", (4,))
    x = tessera.distribute_tensor(values(6, 6), mesh, [Shard(0)]).requires_grad_()
    with torch.no_grad():
        assert not (x * 2).requires_grad
    with torch.inference_mode():
        y = x @ x
        assert y.is_inference() and isinstance(y, DTensor)
        assert_full(y, x.full_tensor() @ x.full_tensor())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x
        assert y.dtype is torch.bfloat16
        z = torch.nn.functional.mse_loss(y, y.detach() * 0.5)
        assert z.dtype is torch.float32
    z.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = x.full_tensor().detach().requires_grad_()
        y = plain @ plain
        torch.nn.functional.mse_loss(y, y.detach() * 0.5).backward()
    assert_full(x.grad, plain.grad, rtol=0.05, atol=0.05)
    with torch.set_grad_enabled(False):
        assert (x * 2).grad_fn is None


@on_ranks()
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant):
    for mesh in meshes():
        x = tessera.distribute_tensor(values(5, 4), mesh, [Shard(0)] * mesh.ndim).requires_grad_()
        plain = values(5, 4).requires_grad_()

        def block(x):
            return torch.nn.functional.gelu(x * 3).pow(2).sum(1)

        checkpoint(block, x, use_reentrant=use_reentrant).sum().backward()
        block(plain).sum().backward()
        assert_full(x.grad, plain.grad)


@on_ranks()
def test_modules_move_and_convert():
    mesh = tessera.init_device_mesh("cpu", (4,))
    module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5))
    for part in module:
        for name, parameter in list(part.named_parameters()):
            setattr(
                part, name, torch.nn.Parameter(tessera.distribute_tensor(parameter.data, mesh, [Shard(0)]))
            )
    before = {name: parameter.detach().full_tensor() for name, parameter in module.named_parameters()}
    for convert, dtype in (
        (lambda: module.double(), torch.float64),
        (lambda: module.to(torch.bfloat16), torch.bfloat16),
        (lambda: module.to("cpu", torch.float32), torch.float32),
    ):
        convert()
        for parameter in module.parameters():
            assert (
                parameter.dtype is dtype
                and isinstance(parameter, DTensor)
                and isinstance(parameter, torch.nn.Parameter)
            )
            assert parameter.placements == (Shard(0),)
    for name, parameter in module.named_parameters():
        assert_full(parameter.detach(), before[name], rtol=0.02, atol=0.02)
    module.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in module.parameters())
    module.zero_grad()


@on_ranks()
def test_python_protocols():
    mesh = tessera.init_device_mesh("cpu", (4,))
    full = values(5, 3)
    x = tessera.distribute_tensor(full, mesh, [Shard(0)])
    assert len(x) == 5 and x.shape == (5, 3) and x.numel() == 15 and x.ndim == 2 and x.dtype is torch.float32
    assert x.device.type == "cpu" and not x.is_meta and x.layout is torch.strided
    assert hash(x) == hash(x) and {x: 1}[x] == 1
    assert weakref.ref(x)() is x
    assert x.tolist() == full.tolist()
    assert float(x.sum()) == pytest.approx(float(full.sum()), abs=1e-5)
    assert int((x > 0).sum()) == int((full > 0).sum())
    assert f"{x.sum():.2f}" == f"{full.sum():.2f}"
    with pytest.raises(TypeError, match="full_tensor"):
        x.numpy()
    with pytest.raises(RuntimeError, match="to_local"):
        x.data_ptr()
    first, *_rest = x
    assert_full(first, full[0])
    x[:, 1:3] = 7.0
    full[:, 1:3] = 7.0
    assert_full(x, full)
    x += x
    assert_full(x, full + full)


@on_ranks()
def test_mixing_with_plain_tensors():
    mesh = tessera.init_device_mesh("cpu", (4,))
    x = tessera.distribute_tensor(values(5, 3), mesh, [Shard(0)])
    assert_full(x * torch.tensor(2.0), values(5, 3) * 2)
    with pytest.raises(ValueError, match="aten::mul.Tensor.*'other'.*distribute_tensor"):
        x * values(5, 3)
    with tessera.experimental.implicit_replication():
        assert_full(x * values(5, 3), values(5, 3) ** 2)
    with pytest.raises(ValueError):
        x * values(5, 3)


@on_ranks()
def test_custom_functions_and_gradient_checks():
    mesh = tessera.init_device_mesh("cpu", (2, 2))

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * 3 * x**2

    x = tessera.distribute_tensor(values(5, 3), mesh, [Shard(0), Partial()]).requires_grad_()
    y = Cube.apply(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert_full(gradient.detach(), 3 * values(5, 3) ** 2)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    assert_full(second, 6 * values(5, 3))
