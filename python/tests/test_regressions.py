"""What users of distributed tensors elsewhere met: refused, or silently wrong. Each against one device."""

import pytest
import torch
from torch.nn import functional as F

import tessera
from ranks import assert_whole, meshes, on_ranks, placements_of, values
from tessera import DTensor, Partial, Replicate, Shard, _StridedShard


def partial(whole, mesh):
    """Its parts differ from rank to rank."""
    return tessera.distribute_tensor(whole, mesh, [Shard(0)] * mesh.ndim).redistribute(placements=[Partial()] * mesh.ndim)


@on_ranks()
def test_numbers_and_partial_sums():
    for mesh in meshes():
        whole = values(6, 5)
        x = partial(whole, mesh)
        assert_whole(x + 1, whole + 1)
        assert_whole(1 - x, 1 - whole)
        for factor in (2.0, 3.0, -1.5, 0.0):
            assert_whole(x * factor, whole * factor)
            assert_whole(x * torch.tensor(factor), whole * factor)
            assert_whole(x.mul_(1.0), whole)
        assert_whole(x / 4, whole / 4)
        assert x.sum().item() == pytest.approx(whole.sum().item(), abs=1e-4)
        assert x[0, 0].item() == pytest.approx(whole[0, 0].item(), abs=1e-6)
        assert_whole(x.max(), whole.max())
        assert_whole(x.min(), whole.min())
        assert_whole(x.norm(), whole.norm())
        assert_whole(torch.linalg.vector_norm(x, 3), torch.linalg.vector_norm(whole, 3))
        assert_whole(x.abs(), whole.abs())
        assert_whole(x.to(torch.float64), whole.to(torch.float64))
        assert_whole(x.clamp_(-0.5, 0.5), whole.clamp(-0.5, 0.5))
        assert x.placements == (Partial(),) * mesh.ndim


@on_ranks()
def test_views_that_regroup_a_cut_dim():
    for mesh in meshes():
        whole = values(12, 8)
        for placements in placements_of(whole, mesh):
            x = tessera.distribute_tensor(whole, mesh, placements)
            for shape in ((16, 6), (96,), (3, 4, 8), (12, 2, 4), (2, 6, 2, 4), (4, 24)):
                assert_whole(x.view(shape), whole.view(shape))


@on_ranks()
def test_shapes_changed_in_place():
    for mesh in meshes():
        whole = values(1, 5, 1, 3)
        x = tessera.distribute_tensor(whole, mesh, [Shard(1)] * mesh.ndim)
        x.squeeze_(0)
        assert x.shape == (5, 1, 3) and x.placements == (Shard(0),) * mesh.ndim
        assert_whole(x, whole.squeeze(0))
        x.squeeze_().unsqueeze_(0)
        assert_whole(x, whole.squeeze().unsqueeze(0))
        x.transpose_(0, 1)
        assert_whole(x, whole.squeeze().unsqueeze(0).transpose(0, 1))


@on_ranks()
def test_writes_into_slices_of_a_cut_dim():
    for mesh in meshes():
        for placements in placements_of(values(6, 5), mesh):
            for index in ((slice(2, 5),), (3,), (slice(None), slice(1, 4)), (slice(None, None, 2),), (2, 3), (..., -1)):
                whole, x = values(6, 5), tessera.distribute_tensor(values(6, 5), mesh, placements)
                whole[index] = 7.0
                x[index] = 7.0
                assert_whole(x, whole)
                whole[index] += 1.0
                x[index] += 1.0
                assert_whole(x, whole)
                given = values(*whole[index].shape, seed=3)
                whole[index] = given
                x[index] = tessera.distribute_tensor(given, mesh)
                assert_whole(x, whole)
                assert x.placements == placements


@on_ranks()
def test_gradients_of_writes_into_slices():
    for mesh in meshes():
        for placements in placements_of(values(6, 5), mesh):
            gradients = []
            for start in (values(6, 5).requires_grad_(), tessera.distribute_tensor(values(6, 5), mesh, placements).requires_grad_()):
                y = start * 2
                y[1:4] = y[2:5] * 3
                y[:, 2].mul_(0.5)
                (y**2).sum().backward()
                gradients.append(start.grad)
            assert_whole(gradients[1], gradients[0])


@on_ranks()
def test_scatter_and_index_put():
    index = torch.tensor([[0, 2, 1], [4, 0, 3], [1, 1, 0]])
    for mesh in meshes():
        for placements in placements_of(values(6, 5), mesh):
            whole, x = values(6, 5), tessera.distribute_tensor(values(6, 5), mesh, placements)
            distributed = tessera.distribute_tensor(index, mesh)
            source = tessera.distribute_tensor(values(3, 3), mesh)
            assert_whole(x.scatter(1, distributed, source), whole.scatter(1, index, values(3, 3)))
            assert_whole(x.scatter_add(0, distributed, source), whole.scatter_add(0, index, values(3, 3)))
            assert_whole(x.scatter_(1, distributed, 9.0), whole.scatter_(1, index, 9.0))
            rows, columns = torch.tensor([0, 5, 2]), torch.tensor([1, 1, 4])
            place = tuple(tessera.distribute_tensor(i, mesh) for i in (rows, columns))
            x[place] = tessera.distribute_tensor(values(3), mesh)
            whole[rows, columns] = values(3)
            assert_whole(x, whole)
            assert_whole(x[[0, 5, 2]], whole[[0, 5, 2]])
            x[[1, 3]] = 0.0
            whole[[1, 3]] = 0.0
            assert_whole(x, whole)
            assert x.placements == placements


@on_ranks()
def test_convolution_and_its_gradients():
    for mesh in meshes():
        for placements in placements_of(torch.empty(5, 3, 8, 7), mesh):
            results = []
            for distribute in (lambda t: t, lambda t: tessera.distribute_tensor(t, mesh, placements if t.ndim == 4 and t.shape[0] == 5 else None)):
                x, weight, bias = (distribute(values(*shape, seed=n)).requires_grad_() for n, shape in enumerate(((5, 3, 8, 7), (4, 3, 3, 3), (4,))))
                y = F.conv2d(x, weight, bias, stride=2, padding=1)
                (y**2).sum().backward()
                results.append([y.detach(), x.grad, weight.grad, bias.grad])
            for ours, theirs in zip(results[1], results[0]):
                assert_whole(ours, theirs, rtol=1e-3, atol=1e-3)


LOSSES = {
    "bce": lambda x, t, r: F.binary_cross_entropy(x.sigmoid(), t, reduction=r),
    "bce_with_logits": lambda x, t, r: F.binary_cross_entropy_with_logits(x, t, reduction=r),
    "soft_margin": lambda x, t, r: F.soft_margin_loss(x, t * 2 - 1, reduction=r),
    "mse": lambda x, t, r: F.mse_loss(x, t, reduction=r),
    "l1": lambda x, t, r: F.l1_loss(x, t, reduction=r),
    "smooth_l1": lambda x, t, r: F.smooth_l1_loss(x, t, reduction=r),
    "huber": lambda x, t, r: F.huber_loss(x, t, reduction=r),
    "kl_div": lambda x, t, r: F.kl_div(x.log_softmax(0), t, reduction=r),
    "hinge": lambda x, t, r: F.hinge_embedding_loss(x, t * 2 - 1, reduction=r),
}


@pytest.mark.parametrize("name", LOSSES)
@on_ranks()
def test_losses_on_five_elements_over_four_ranks(name):
    target = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    for mesh in meshes():
        for reduction in ("mean", "sum", "none"):
            for placements in placements_of(values(5), mesh):
                plain = values(5).requires_grad_()
                x = tessera.distribute_tensor(values(5), mesh, placements).requires_grad_()
                expected = LOSSES[name](plain, target, reduction)
                loss = LOSSES[name](x, tessera.distribute_tensor(target, mesh, [Shard(0)] * mesh.ndim), reduction)
                assert_whole(loss.detach(), expected.detach())
                expected.sum().backward()
                loss.sum().backward()
                assert_whole(x.grad, plain.grad)


@on_ranks()
def test_attention_with_a_cut_sequence():
    for mesh in meshes():
        for causal in (False, True):
            for placements in placements_of(torch.empty(2, 4, 6, 8), mesh, partial=False):
                results = []
                for distribute in (lambda t: t, lambda t: tessera.distribute_tensor(t, mesh, placements)):
                    q, k, v = (distribute(values(2, 4, 6, 8, seed=n)).requires_grad_() for n in range(3))
                    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
                    (y**2).sum().backward()
                    results.append([y.detach(), q.grad, k.grad, v.grad])
                for ours, theirs in zip(results[1], results[0]):
                    assert_whole(ours, theirs, rtol=1e-3, atol=1e-4)


@on_ranks()
def test_tensors_without_dims_or_elements():
    for mesh in meshes():
        for placement in (Replicate(), Partial()):
            x = tessera.distribute_tensor(torch.tensor(3.0), mesh, [placement] * mesh.ndim).requires_grad_()
            (x * x + 1).backward()
            assert_whole(x.grad, torch.tensor(6.0))
            assert x.item() == 3.0 and x.shape == ()
        for shape in ((0,), (0, 3), (3, 0)):
            for placements in placements_of(torch.empty(shape), mesh):
                x = tessera.distribute_tensor(torch.empty(shape), mesh, placements).requires_grad_()
                assert_whole(x.sum().detach(), torch.tensor(0.0))
                assert_whole((x * 2).detach(), torch.empty(shape))
                assert_whole(x.mean().detach(), torch.tensor(float("nan")), equal_nan=True)
                (x * 2).sum().backward()
                assert_whole(x.grad, torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.int32, torch.int64, torch.uint8, torch.bool, torch.float16, torch.bfloat16])
@on_ranks()
def test_dtypes(dtype):
    for mesh in meshes():
        whole = (values(6, 5) * 3).to(dtype)
        for placements in placements_of(whole, mesh, partial=dtype is not torch.bool):
            x = tessera.distribute_tensor(whole, mesh, placements)
            assert_whole(x, whole)
            assert_whole(x.T, whole.T)
            assert_whole(x == x, whole == whole)
            assert_whole(x.sum(0), whole.sum(0), rtol=0.02, atol=0.05)
            if dtype is not torch.bool:
                assert_whole(x + x, whole + whole)
                assert_whole(x * x, whole * whole, rtol=0.02, atol=0.02)
                assert_whole(x.to(torch.float32) if not dtype.is_complex else x.real, whole.to(torch.float32) if not dtype.is_complex else whole.real)


@pytest.mark.parametrize("order", [2.0, float("inf")])
@pytest.mark.parametrize("foreach", [False, True])
@on_ranks()
def test_clipping_gradients_of_parameters_on_different_meshes(foreach, order):
    root = tessera.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = tessera.init_device_mesh("cpu", (4,))
    plain = [values(5, 3).requires_grad_(), values(4, seed=1).requires_grad_(), values(3, 4, seed=2).requires_grad_()]
    ours = [
        tessera.distribute_tensor(values(5, 3), root, [Shard(0), Shard(1)]).requires_grad_(),
        tessera.distribute_tensor(values(4, seed=1), root["tp"], [Shard(0)]).requires_grad_(),
        tessera.distribute_tensor(values(3, 4, seed=2), flat, [Shard(1)]).requires_grad_(),
    ]
    for parameters in (plain, ours):
        for parameter in parameters:
            (parameter**3).sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(plain, 0.5, norm_type=order, foreach=foreach)
    assert_whole(torch.nn.utils.clip_grad_norm_(ours, 0.5, norm_type=order, foreach=foreach), expected)
    for a, b in zip(ours, plain):
        assert_whole(a.grad, b.grad)


@on_ranks()
def test_lists_of_mixed_placements():
    for mesh in meshes():
        shapes = ((5, 3), (4,), (2, 6), (1, 1))
        placements = ([Shard(0)], [Replicate()], [Partial()], [Shard(1)])
        a = [tessera.distribute_tensor(values(*s, seed=n), mesh, p * mesh.ndim) for n, (s, p) in enumerate(zip(shapes, placements))]
        b = [tessera.distribute_tensor(values(*s, seed=n + 9), mesh, p * mesh.ndim) for n, (s, p) in enumerate(zip(shapes, ([Replicate()], [Partial()], [Shard(1)], [Shard(0)])))]
        whole_a = [values(*s, seed=n) for n, s in enumerate(shapes)]
        whole_b = [values(*s, seed=n + 9) for n, s in enumerate(shapes)]
        for ours, theirs in (
            (torch._foreach_add(a, b, alpha=2), torch._foreach_add(whole_a, whole_b, alpha=2)),
            (torch._foreach_mul(a, 3.0), torch._foreach_mul(whole_a, 3.0)),
            (torch._foreach_add(a, 1.0), torch._foreach_add(whole_a, 1.0)),
            (torch._foreach_norm(a), torch._foreach_norm(whole_a)),
            (torch._foreach_norm(a, float("inf")), torch._foreach_norm(whole_a, float("inf"))),
            (torch._foreach_addcmul(a, b, b), torch._foreach_addcmul(whole_a, whole_b, whole_b)),
        ):
            for x, y in zip(ours, theirs):
                assert_whole(x, y)
        before = [x.placements for x in a]
        torch._foreach_sub_(a, b)
        torch._foreach_sub_(whole_a, whole_b)
        for x, y, p in zip(a, whole_a, before):
            assert_whole(x, y)
            assert x.placements == p and isinstance(x, DTensor)


@on_ranks()
def test_stacking_many_tensors():
    mesh = tessera.init_device_mesh("cpu", (4,))
    tensors = [tessera.distribute_tensor(values(3, seed=n), mesh, [Shard(0)], src_data_rank=None) for n in range(1000)]
    assert_whole(torch.stack(tensors), torch.stack([values(3, seed=n) for n in range(1000)]))
    assert_whole(torch.cat(tensors), torch.cat([values(3, seed=n) for n in range(1000)]))


REFUSED = {
    "geometric": lambda x: x.geometric_(-1),
    "exponential": lambda x: x.exponential_(0),
    "cauchy": lambda x: x.cauchy_(0, -1),
    "log_normal": lambda x: x.log_normal_(0, 0),
    "normal": lambda x: x.normal_(0, -1),
    "uniform": lambda x: x.uniform_(2, 1),
    "random": lambda x: x.random_(3, 3),
    "bernoulli": lambda x: x.bernoulli_(2.0),
    "dropout": lambda x: torch.dropout(x, 2.0, True),
    "multinomial": lambda x: torch.multinomial(x.abs(), 9),
    "gather": lambda x: x.gather(0, x.long() + 9),
    "scatter": lambda x: x.scatter(0, x.long() + 9, 1.0),
    "scatter_add": lambda x: x.scatter_add(0, x.long() + 9, x),
    "index_add": lambda x: x.index_add(0, x.long() + 9, x),
    "index_select": lambda x: x.index_select(0, x.long() + 9),
    "index_put": lambda x: x.index_put((x.long() + 9,), x),
    "take": lambda x: x.take(x.long() + 9),
    "embedding": lambda x: F.embedding(x.long() + 9, x.unsqueeze(1)),
    "embedding_bag": lambda x: F.embedding_bag(x.long().unsqueeze(0) + 9, x.unsqueeze(1)),
    "exponential dtype": lambda x: x.long().exponential_(),
    "cauchy dtype": lambda x: x.long().cauchy_(),
    "geometric dtype": lambda x: x.bool().geometric_(0.5),
    "normal dtype": lambda x: x.long().normal_(),
    "uniform dtype": lambda x: x.long().uniform_(),
    "random dtype": lambda x: x.cfloat().random_(),
    "bernoulli dtype": lambda x: torch.bernoulli(x.long()),
    "bernoulli into complex": lambda x: x.cfloat().bernoulli_(torch.full_like(x, 0.5)),
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks()
def test_what_is_refused_has_the_error_of_one_device(name):
    for mesh in meshes():
        with pytest.raises(Exception) as expected:
            REFUSED[name](values(4))
        with pytest.raises(Exception) as found:
            REFUSED[name](tessera.distribute_tensor(values(4), mesh, [Shard(0)] * mesh.ndim))
        assert type(found.value) is type(expected.value), found.value


@on_ranks()
def test_what_is_moved_is_not_autocast():
    """Libtorch refuses to join float16 where autocast is to bfloat16; ranks join what they move."""
    for mesh in meshes():
        whole = values(8, 4).half()
        with torch.autocast("cpu", torch.bfloat16):
            for placements in ([Shard(0)] * mesh.ndim, [_StridedShard(0, split_factor=2)] + [Replicate()] * (mesh.ndim - 1)):
                x = tessera.distribute_tensor(whole, mesh, placements, src_data_rank=None)
                assert_whole(x, whole)
                assert_whole(x.redistribute(placements=[Shard(1)] * mesh.ndim), whole)
                assert_whole(x.flip(0), whole.flip(0))
                assert_whole(x[[5, 0, 3]], whole[[5, 0, 3]])


@on_ranks()
def test_as_strided_of_expanded_tensors():
    for mesh in meshes():
        for placements in placements_of(values(1, 20), mesh):
            whole, x = values(1, 20).expand(3, 20), tessera.distribute_tensor(values(1, 20), mesh, placements).expand(3, 20)
            assert_whole(x.as_strided((3, 4, 5), (0, 5, 1)), whole.as_strided((3, 4, 5), (0, 5, 1)))
