"""What users of distributed tensors elsewhere met: refused, or silently wrong. Each against one device."""

import contextlib
import copy
import functools
import itertools

import pytest
import torch
from ranks import Collectives, assert_full, meshes, on_ranks, placements_of, values
from tessera.experimental import implicit_replication
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import tessera
from tessera import DTensor, Partial, Replicate, Shard, _StridedShard


def partial(full, mesh):
    """Its local tensors differ from rank to rank."""
    return tessera.distribute_tensor(full, mesh, [Shard(0)] * mesh.ndim).redistribute(
        placements=[Partial()] * mesh.ndim
    )


@on_ranks()
def test_numbers_and_partial_sums():
    for mesh in meshes():
        full = values(6, 5)
        x = partial(full, mesh)
        assert_full(x + 1, full + 1)
        assert_full(1 - x, 1 - full)
        for factor in (2.0, 3.0, -1.5, 0.0):
            assert_full(x * factor, full * factor)
            assert_full(x * torch.tensor(factor), full * factor)
            assert_full(x.mul_(1.0), full)
        assert_full(x / 4, full / 4)
        assert x.sum().item() == pytest.approx(full.sum().item(), abs=1e-4)
        assert x[0, 0].item() == pytest.approx(full[0, 0].item(), abs=1e-6)
        assert_full(x.max(), full.max())
        assert_full(x.min(), full.min())
        assert_full(x.norm(), full.norm())
        assert_full(torch.linalg.vector_norm(x, 3), torch.linalg.vector_norm(full, 3))
        assert_full(x.abs(), full.abs())
        assert_full(x.to(torch.float64), full.to(torch.float64))
        assert_full(x.clamp_(-0.5, 0.5), full.clamp(-0.5, 0.5))
        assert x.placements == (Partial(),) * mesh.ndim


@on_ranks()
def test_views_that_regroup_a_cut_dim():
    for mesh in meshes():
        full = values(12, 8)
        for placements in placements_of(full, mesh):
            x = tessera.distribute_tensor(full, mesh, placements)
            for shape in ((16, 6), (96,), (3, 4, 8), (12, 2, 4), (2, 6, 2, 4), (4, 24)):
                assert_full(x.view(shape), full.view(shape))


@on_ranks()
def test_shapes_changed_in_place():
    for mesh in meshes():
        full = values(1, 5, 1, 3)
        x = tessera.distribute_tensor(full, mesh, [Shard(1)] * mesh.ndim)
        x.squeeze_(0)
        assert x.shape == (5, 1, 3) and x.placements == (Shard(0),) * mesh.ndim
        assert_full(x, full.squeeze(0))
        x.squeeze_().unsqueeze_(0)
        assert_full(x, full.squeeze().unsqueeze(0))
        x.transpose_(0, 1)
        assert_full(x, full.squeeze().unsqueeze(0).transpose(0, 1))


@on_ranks()
def test_writes_into_slices_of_a_cut_dim():
    for mesh in meshes():
        for placements in placements_of(values(6, 5), mesh):
            for index in (
                (slice(2, 5),),
                (3,),
                (slice(None), slice(1, 4)),
                (slice(None, None, 2),),
                (2, 3),
                (..., -1),
            ):
                full, x = values(6, 5), tessera.distribute_tensor(values(6, 5), mesh, placements)
                full[index] = 7.0
                x[index] = 7.0
                assert_full(x, full)
                full[index] += 1.0
                x[index] += 1.0
                assert_full(x, full)
                given = values(*full[index].shape, seed=3)
                full[index] = given
                x[index] = tessera.distribute_tensor(given, mesh)
                assert_full(x, full)
                assert x.placements == placements


@on_ranks()
def test_gradients_of_writes_into_slices():
    for mesh in meshes():
        for placements in placements_of(values(6, 5), mesh):
            gradients = []
            for start in (
                values(6, 5).requires_grad_(),
                tessera.distribute_tensor(values(6, 5), mesh, placements).requires_grad_(),
            ):
                y = start * 2
                y[1:4] = y[2:5] * 3
                y[:, 2].mul_(0.5)
                (y**2).sum().backward()
                gradients.append(start.grad)
            assert_full(gradients[1], gradients[0])


@on_ranks()
def test_scatter_and_index_put():
    index = torch.tensor([[0, 2, 1], [4, 0, 3], [1, 1, 0]])
    for mesh in meshes():
        for placements in placements_of(values(6, 5), mesh):
            full, x = values(6, 5), tessera.distribute_tensor(values(6, 5), mesh, placements)
            distributed = tessera.distribute_tensor(index, mesh)
            source = tessera.distribute_tensor(values(3, 3), mesh)
            assert_full(x.scatter(1, distributed, source), full.scatter(1, index, values(3, 3)))
            assert_full(x.scatter_add(0, distributed, source), full.scatter_add(0, index, values(3, 3)))
            assert_full(x.scatter_(1, distributed, 9.0), full.scatter_(1, index, 9.0))
            rows, columns = torch.tensor([0, 5, 2]), torch.tensor([1, 1, 4])
            place = tuple(tessera.distribute_tensor(i, mesh) for i in (rows, columns))
            x[place] = tessera.distribute_tensor(values(3), mesh)
            full[rows, columns] = values(3)
            assert_full(x, full)
            assert_full(x[[0, 5, 2]], full[[0, 5, 2]])
            x[[1, 3]] = 0.0
            full[[1, 3]] = 0.0
            assert_full(x, full)
            assert x.placements == placements


@on_ranks()
def test_convolution_and_its_gradients():
    for mesh in meshes():
        for placements in placements_of(torch.empty(5, 3, 8, 7), mesh):
            results = []
            for distribute in (
                lambda t: t,
                lambda t: tessera.distribute_tensor(
                    t, mesh, placements if t.ndim == 4 and t.shape[0] == 5 else None
                ),
            ):
                x, weight, bias = (
                    distribute(values(*shape, seed=n)).requires_grad_()
                    for n, shape in enumerate(((5, 3, 8, 7), (4, 3, 3, 3), (4,)))
                )
                y = F.conv2d(x, weight, bias, stride=2, padding=1)
                (y**2).sum().backward()
                results.append([y.detach(), x.grad, weight.grad, bias.grad])
            for ours, theirs in zip(results[1], results[0]):
                assert_full(ours, theirs, rtol=1e-3, atol=1e-3)


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
                loss = LOSSES[name](
                    x, tessera.distribute_tensor(target, mesh, [Shard(0)] * mesh.ndim), reduction
                )
                assert_full(loss.detach(), expected.detach())
                expected.sum().backward()
                loss.sum().backward()
                assert_full(x.grad, plain.grad)


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
                    assert_full(ours, theirs, rtol=1e-3, atol=1e-4)


@on_ranks()
def test_tensors_without_dims_or_elements():
    for mesh in meshes():
        for placement in (Replicate(), Partial()):
            x = tessera.distribute_tensor(torch.tensor(3.0), mesh, [placement] * mesh.ndim).requires_grad_()
            (x * x + 1).backward()
            assert_full(x.grad, torch.tensor(6.0))
            assert x.item() == 3.0 and x.shape == ()
        for shape in ((0,), (0, 3), (3, 0)):
            for placements in placements_of(torch.empty(shape), mesh):
                x = tessera.distribute_tensor(torch.empty(shape), mesh, placements).requires_grad_()
                assert_full(x.sum().detach(), torch.tensor(0.0))
                assert_full((x * 2).detach(), torch.empty(shape))
                assert_full(x.mean().detach(), torch.tensor(float("nan")), equal_nan=True)
                (x * 2).sum().backward()
                assert_full(x.grad, torch.zeros(shape))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.complex64,
        torch.complex128,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.float16,
        torch.bfloat16,
    ],
)
@on_ranks()
def test_dtypes(dtype):
    for mesh in meshes():
        full = (values(6, 5) * 3).to(dtype)
        for placements in placements_of(full, mesh, partial=dtype is not torch.bool):
            x = tessera.distribute_tensor(full, mesh, placements)
            assert_full(x, full)
            assert_full(x.T, full.T)
            assert_full(x == x, full == full)
            assert_full(x.sum(0), full.sum(0), rtol=0.02, atol=0.05)
            if dtype is not torch.bool:
                assert_full(x + x, full + full)
                assert_full(x * x, full * full, rtol=0.02, atol=0.02)
                assert_full(
                    x.to(torch.float32) if not dtype.is_complex else x.real,
                    full.to(torch.float32) if not dtype.is_complex else full.real,
                )


@pytest.mark.parametrize("order", [2.0, float("inf")])
@pytest.mark.parametrize("foreach", [False, True])
@on_ranks()
def test_clipping_gradients_of_parameters_on_different_meshes(foreach, order):
    root = tessera.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = tessera.init_device_mesh("cpu", (4,))
    plain = [
        values(5, 3).requires_grad_(),
        values(4, seed=1).requires_grad_(),
        values(3, 4, seed=2).requires_grad_(),
    ]
    ours = [
        tessera.distribute_tensor(values(5, 3), root, [Shard(0), Shard(1)]).requires_grad_(),
        tessera.distribute_tensor(values(4, seed=1), root["tp"], [Shard(0)]).requires_grad_(),
        tessera.distribute_tensor(values(3, 4, seed=2), flat, [Shard(1)]).requires_grad_(),
    ]
    for parameters in (plain, ours):
        for parameter in parameters:
            (parameter**3).sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(plain, 0.5, norm_type=order, foreach=foreach)
    assert_full(torch.nn.utils.clip_grad_norm_(ours, 0.5, norm_type=order, foreach=foreach), expected)
    for a, b in zip(ours, plain):
        assert_full(a.grad, b.grad)


@on_ranks()
def test_lists_of_mixed_placements():
    for mesh in meshes():
        shapes = ((5, 3), (4,), (2, 6), (1, 1))
        placements = ([Shard(0)], [Replicate()], [Partial()], [Shard(1)])
        a = [
            tessera.distribute_tensor(values(*s, seed=n), mesh, p * mesh.ndim)
            for n, (s, p) in enumerate(zip(shapes, placements))
        ]
        b = [
            tessera.distribute_tensor(values(*s, seed=n + 9), mesh, p * mesh.ndim)
            for n, (s, p) in enumerate(zip(shapes, ([Replicate()], [Partial()], [Shard(1)], [Shard(0)])))
        ]
        full_a = [values(*s, seed=n) for n, s in enumerate(shapes)]
        full_b = [values(*s, seed=n + 9) for n, s in enumerate(shapes)]
        for ours, theirs in (
            (torch._foreach_add(a, b, alpha=2), torch._foreach_add(full_a, full_b, alpha=2)),
            (torch._foreach_mul(a, 3.0), torch._foreach_mul(full_a, 3.0)),
            (torch._foreach_add(a, 1.0), torch._foreach_add(full_a, 1.0)),
            (torch._foreach_norm(a), torch._foreach_norm(full_a)),
            (torch._foreach_norm(a, float("inf")), torch._foreach_norm(full_a, float("inf"))),
            (torch._foreach_addcmul(a, b, b), torch._foreach_addcmul(full_a, full_b, full_b)),
        ):
            for x, y in zip(ours, theirs):
                assert_full(x, y)
        before = [x.placements for x in a]
        torch._foreach_sub_(a, b)
        torch._foreach_sub_(full_a, full_b)
        for x, y, p in zip(a, full_a, before):
            assert_full(x, y)
            assert x.placements == p and isinstance(x, DTensor)


@on_ranks()
def test_stacking_many_tensors():
    mesh = tessera.init_device_mesh("cpu", (4,))
    tensors = [
        tessera.distribute_tensor(values(3, seed=n), mesh, [Shard(0)], src_data_rank=None)
        for n in range(1000)
    ]
    assert_full(torch.stack(tensors), torch.stack([values(3, seed=n) for n in range(1000)]))
    assert_full(torch.cat(tensors), torch.cat([values(3, seed=n) for n in range(1000)]))


DRAWS = {
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
    "rrelu dtype": lambda x: F.rrelu(x.half(), training=True),
    "normal of complex deviations": lambda x: torch.normal(x, x.cfloat()),
    "dropout of complex numbers": lambda x: F.dropout(x.cfloat()),
}


@pytest.mark.parametrize("name", DRAWS)
@on_ranks()
def test_draws_that_one_device_refuses(name):
    for mesh in meshes():
        with pytest.raises(Exception) as expected:
            DRAWS[name](values(4))
        with pytest.raises(Exception) as found:
            DRAWS[name](tessera.distribute_tensor(values(4), mesh, [Shard(0)] * mesh.ndim))
        assert type(found.value) is type(expected.value), found.value


@on_ranks()
def test_what_is_moved_is_not_autocast():
    """Libtorch refuses to join float16 where autocast is to bfloat16; ranks join what they move."""
    for mesh in meshes():
        full = values(8, 4).half()
        with torch.autocast("cpu", torch.bfloat16):
            for placements in (
                [Shard(0)] * mesh.ndim,
                [_StridedShard(0, split_factor=2)] + [Replicate()] * (mesh.ndim - 1),
            ):
                x = tessera.distribute_tensor(full, mesh, placements, src_data_rank=None)
                assert_full(x, full)
                assert_full(x.redistribute(placements=[Shard(1)] * mesh.ndim), full)
                assert_full(x.flip(0), full.flip(0))
                assert_full(x[[5, 0, 3]], full[[5, 0, 3]])


@on_ranks()
def test_what_operators_are_computed_by_is_not_autocast():
    """Libtorch casts the arguments of baddbmm, but not where it writes into a tensor, as the functional operator is called for here."""
    full = values(2, 3, 3)
    for mesh in meshes():
        x = tessera.distribute_tensor(full, mesh, [Shard(0)] * mesh.ndim)
        with torch.autocast("cpu", torch.bfloat16):
            out = torch.zeros_like(x)
            torch.baddbmm(x, x, x, out=out)
            assert_full(out, torch.baddbmm(full, full, full, out=torch.zeros_like(full)))
            with pytest.raises(RuntimeError, match="dtype"):
                torch.baddbmm(x, x, x, out=out.bfloat16())


@on_ranks()
def test_as_strided_of_expanded_tensors():
    for mesh in meshes():
        for placements in placements_of(values(1, 20), mesh):
            full, x = (
                values(1, 20).expand(3, 20),
                tessera.distribute_tensor(values(1, 20), mesh, placements).expand(3, 20),
            )
            assert_full(x.as_strided((3, 4, 5), (0, 5, 1)), full.as_strided((3, 4, 5), (0, 5, 1)))


REFUSED = {
    "softmax of integers": lambda x: x.long().softmax(0),
    "log_softmax of integers": lambda x: x.long().log_softmax(0),
    "argmax of bools": lambda x: (x > 0).argmax(0),
    "argmin of bools": lambda x: (x > 0).argmin(),
    "cumsum of a dim that is not there": lambda x: x.cumsum(2),
    "logcumsumexp of integers": lambda x: x.long().logcumsumexp(0),
    "std of integers": lambda x: x.long().std(0),
    "topk of complex numbers": lambda x: torch.complex(x, x).topk(2, 0),
    "median of complex numbers": lambda x: torch.complex(x, x).median(),
    "more than there are": lambda x: x.topk(9, 0),
    "gather of more than there is": lambda x: x.gather(
        0, torch.zeros_like(x, dtype=torch.int64).repeat(1, 2)
    ),
    "batch_norm of complex numbers": lambda x: F.batch_norm(torch.complex(x, x), None, None, training=True),
    "interpolation of integers": lambda x: F.interpolate(x[None].int(), scale_factor=2.0),
    "soft_margin_loss of bytes": lambda x: F.soft_margin_loss(x.byte(), x.byte()),
    "an average over nothing": lambda x: F.avg_pool2d(x[None], 2, divisor_override=0),
    "an output of another dtype": lambda x: torch.aminmax(x, dim=0, out=(x[0].double(), x[0].double())),
    "a range the other way round": lambda x: x.clone().uniform_(2, 1),
    "erfinv, on ranks that hold nothing": lambda x: torch.complex(x, x)[:2].erfinv(),
    "a product of two dtypes": lambda x: torch.bmm(x[None], x[None].double().mT),
    "a convolution of two dtypes": lambda x: F.conv1d(x[None], x[None].long()),
    "batch_norm of two dtypes": lambda x: F.batch_norm(x.double(), None, None, x[0], training=True),
    "bincount of floats": lambda x: x.flatten().half().bincount(),
    "a histogram of bfloat16": lambda x: x.bfloat16().histogram(4),
    "fewer than none": lambda x: x.topk(-1, 0),
    "isin of bools": lambda x: torch.isin(x[:2] > 0, x[0] > 0),
    "max_unpool of bools": lambda x: F.max_unpool3d(
        (x > 0)[None, :, :, None, None], torch.zeros_like(x, dtype=torch.int64)[None, :, :, None, None], 1
    ),
    "batch_norm with a weight of bytes": lambda x: F.batch_norm(
        x, None, None, x[0].byte(), x[0], training=True
    ),
    "bincount of fewer than no bins": lambda x: x.flatten().long().abs().bincount(minlength=-5),
    "segments of fractional lengths": lambda x: torch.segment_reduce(
        x[:2].flatten(), "sum", lengths=torch.ones_like(x[0], dtype=torch.float64)
    ),
    "statistics of two dims": lambda x: F.batch_norm(x, x[:1], None, training=False),
}


@on_ranks()
def test_a_scalar_is_not_scattered_into_a_diagonal():
    for mesh in meshes():
        x = tessera.distribute_tensor(values(4, 4), mesh, [Shard(0)] * mesh.ndim)
        with pytest.raises(RuntimeError, match="expected a source of sizes"):
            x.diagonal_scatter(x[0, 0])


SEEN_BY_ONE = {
    "gather": lambda x, index: x.gather(1, index),
    "scatter": lambda x, index: x.scatter(1, index, 1.0),
    "scatter_add": lambda x, index: x.scatter_add(1, index, x),
    "index_select": lambda x, index: x.index_select(0, index[:, 0]),
    "take": lambda x, index: x.take(index + 90),
    "index": lambda x, index: x[index[:, 0]],
    "multi_margin_loss": lambda x, index: F.multi_margin_loss(x, index[:, 0]),
    "a division by zero": lambda x, index: x.long() // (9 - index),
    "a rounded division": lambda x, index: torch.div(x.long(), 9 - index, rounding_mode="trunc"),
    "a division in place": lambda x, index: index.clone().floor_divide_(9 - index),
    "a remainder": lambda x, index: index % (9 - index),
    "a remainder of a number": lambda x, index: 5 % (9 - index),
    "fmod": lambda x, index: index.fmod(9 - index),
}


@pytest.mark.parametrize("name", SEEN_BY_ONE)
@on_ranks()
def test_what_one_rank_alone_sees_is_refused_by_all(name):
    full = torch.zeros(8, 3, dtype=torch.int64)
    full[7] = 9
    with pytest.raises(Exception) as expected:
        SEEN_BY_ONE[name](values(8, 3), full)
    for mesh in meshes():
        index = tessera.distribute_tensor(full, mesh, [Shard(0)] * mesh.ndim)
        for placement in (Replicate(), Shard(0)):
            x = tessera.distribute_tensor(values(8, 3), mesh, [placement] * mesh.ndim)
            with pytest.raises(expected.type):
                SEEN_BY_ONE[name](x, index)
            assert_full(x + 1, values(8, 3) + 1)  # the ranks are in step


@on_ranks()
def test_values_are_looked_at_by_ranks_that_hold_nothing():
    for mesh in meshes():
        x = tessera.distribute_tensor(values(2, 3), mesh, [Shard(0)] * mesh.ndim)
        for index in ([0, 9], [0, -9]):
            with pytest.raises(IndexError):
                x[:, index]
        assert_full(x[:, [2, -1]], values(2, 3)[:, [2, -1]])


DIVISIONS = {
    "floor_divide": lambda x, y: x // y,
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "in place": lambda x, y: x.clone().floor_divide_(y),
    "remainder": lambda x, y: x % y,
    "fmod": lambda x, y: torch.fmod(x, y),
}


@pytest.mark.parametrize("name", DIVISIONS)
@on_ranks()
def test_all_ranks_refuse_to_divide_integers_by_zero(name):
    """Those that compute nothing too, whether a number was divided by before or not. Nothing is communicated."""
    divide = DIVISIONS[name]
    for mesh in meshes():
        for rows in (2, 8):
            full = torch.arange(rows * 3).view(rows, 3) - 2
            x = tessera.distribute_tensor(full, mesh, [Shard(0)] * mesh.ndim)
            zeros = torch.ones_like(full)
            zeros[0, 0] = 0
            for divisor in (0, torch.tensor(0), zeros, zeros[:1]):
                of_one, placed = divisor, divisor
                if isinstance(divisor, torch.Tensor) and divisor.dim():
                    placed = tessera.distribute_tensor(divisor, mesh, [Replicate()] * mesh.ndim)
                with Collectives(mesh) as count:
                    nonzero = divide(x, placed + 2)
                    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                        divide(x, placed)
                    result = divide(x.double(), placed)
                assert count == 0
                assert_full(nonzero, divide(full, of_one + 2))
                assert_full(result, divide(full.double(), of_one), equal_nan=True)
            if name != "in place":
                assert_full(divide(x, 0.0), divide(full, 0.0), equal_nan=True)
                zero = torch.tensor(0.0)
                assert_full(divide(x, zero), divide(full, zero), equal_nan=True)
        empty = tessera.distribute_tensor(full[:0], mesh, [Shard(0)] * mesh.ndim)
        assert_full(divide(empty, 0), divide(full[:0], 0))


@on_ranks()
def test_all_ranks_refuse_to_unravel_into_nothing():
    for mesh in meshes():
        x = tessera.distribute_tensor(torch.arange(2), mesh, [Shard(0)] * mesh.ndim)
        with pytest.raises(RuntimeError):
            torch.unravel_index(x, (3, 0))
        assert_full(torch.stack(torch.unravel_index(x, (3, 4))), torch.tensor([[0, 0], [0, 1]]))


def test_agreeing_on_a_refusal_is_implicit_communication():
    full = torch.zeros(8, 3, dtype=torch.int64)
    full[7] = 9

    def main(mode):
        mesh = tessera.init_device_mesh("cpu", (4,))
        x = tessera.distribute_tensor(values(8, 3), mesh, [Shard(0)])
        index = tessera.distribute_tensor(full, mesh, [Shard(0)])
        with Collectives(mesh) as count, tessera.implicit_communication(mode):
            found = x.gather(1, index.clamp(max=2))
        assert count == (0 if mode == "forbidden" else 1)
        assert_full(found, values(8, 3).gather(1, full.clamp(max=2)))
        # Where it is forbidden, each rank refuses what it sees by itself.
        sees_it = mode != "forbidden" or tessera.get_rank() == 3
        with (
            tessera.implicit_communication(mode),
            pytest.raises(RuntimeError) if sees_it else contextlib.nullcontext(),
        ):
            x.gather(1, index)

    for mode in ("allowed", "forbidden"):
        tessera.run(4, main, mode, timeout=60)
    with pytest.warns(UserWarning, match="ranks have to agree"):
        tessera.run(4, main, "warned", timeout=60)


DOUBLE_GRADIENTS = {
    "abs": torch.abs,
    "l1_loss": lambda x: F.l1_loss(x, x.detach() * 0.5, reduction="none"),
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x, 1),
    "cumprod with zeros": lambda x: torch.cumprod(x * (x > 0), 0),
    "cumprod of a complex number": lambda x: torch.cumprod(torch.complex(x * (x > 0), x * (x > 0)), 1).abs(),
}


@pytest.mark.parametrize("name", DOUBLE_GRADIENTS)
@on_ranks()
def test_double_gradients_are_distributed(name):
    def gradients(x):
        (first,) = torch.autograd.grad(DOUBLE_GRADIENTS[name](x).sum(), x, create_graph=True)
        return first, torch.autograd.grad((first * x).sum(), x)[0]

    expected = gradients(values(5, 3, dtype=torch.float64).requires_grad_())
    for mesh in meshes():
        for placements in placements_of(values(5, 3), mesh, partial=False):
            x = tessera.distribute_tensor(
                values(5, 3, dtype=torch.float64), mesh, placements
            ).requires_grad_()
            for found, each in zip(gradients(x), expected):
                assert_full(found.detach(), each.detach())


@on_ranks()
def test_the_gradient_of_sgn_is_distributed():
    for mesh in meshes():
        x = tessera.distribute_tensor(values(5, 3), mesh, [Shard(0)] * mesh.ndim).requires_grad_()
        torch.sgn(x).sum().backward()
        assert_full(x.grad, torch.zeros(5, 3))


TANGENTS = {
    "mm": lambda x, w: x[0].mm(w),
    "matmul": lambda x, w: x @ w,
    "linear": lambda x, w: F.linear(x, w, w[0]),
    "einsum": lambda x, w: torch.einsum("bij,jk->bik", x, w),
    "index": lambda x, w: x[:, [0, 2]] * w[0],
    "embedding": lambda x, w: F.embedding(torch.zeros_like(x[:, 0, 0], dtype=torch.int64), w) + x[:, 0],
}


@pytest.mark.parametrize("of_both", [False, True])
@pytest.mark.parametrize("name", TANGENTS)
@on_ranks()
def test_forward_mode_of_products(name, of_both):
    """Also where an argument has no tangent, for which libtorch makes plain zeros."""

    def tangent(x, w, dx, dw):
        with forward_ad.dual_level():
            result = TANGENTS[name](
                forward_ad.make_dual(x, dx), forward_ad.make_dual(w, dw) if of_both else w
            )
            return forward_ad.unpack_dual(result).tangent.detach().clone()

    full = [values(2, 4, 3), values(3, 3, seed=1), values(2, 4, 3, seed=2), values(3, 3, seed=3)]
    expected = tangent(*full)
    for mesh in meshes():
        for placement in (Replicate(), Shard(0), Shard(1)):
            for grad in (False, True):
                given = [tessera.distribute_tensor(each, mesh, [placement] * mesh.ndim) for each in full]
                for each in given[:2]:
                    each.requires_grad_(grad)
                assert_full(tangent(*given), expected)


@on_ranks()
def test_jvp_of_a_function_that_closes_over_a_distributed_tensor():
    x, w, v = values(4, 3), values(3, 3, seed=1), values(4, 3, seed=2)
    for mesh in meshes():
        placed = [tessera.distribute_tensor(each, mesh, [Shard(0)] * mesh.ndim) for each in (x, w, v)]
        value, tangent = torch.func.jvp(lambda each: each.mm(placed[1]), (placed[0],), (placed[2],))
        assert_full(value, x.mm(w))
        assert_full(tangent, v.mm(w))


@on_ranks()
def test_forward_mode_through_placements():
    full, direction = values(8, 4), values(8, 4, seed=1)
    for mesh in meshes():
        kinds = (Replicate(), Shard(0), Shard(1), Partial())
        for placements in ([kind] * mesh.ndim for kind in kinds):
            for target in ([kind] * mesh.ndim for kind in kinds):
                x = tessera.distribute_tensor(full, mesh, placements).requires_grad_()
                for of_tangent in (placements, [Replicate()] * mesh.ndim):
                    v = tessera.distribute_tensor(direction, mesh, of_tangent)
                    with forward_ad.dual_level():
                        moved = forward_ad.make_dual(x, v).redistribute(placements=target)
                        assert moved.placements == tuple(target)
                        again = DTensor.from_local(moved.to_local(), mesh, target, shape=full.shape)
                        for dual in (moved, again):
                            primal, tangent = forward_ad.unpack_dual(dual)
                            assert_full(primal.detach(), full)
                            assert_full(tangent.detach(), direction)
                        primal, tangent = forward_ad.unpack_dual(moved.full_tensor())
                        torch.testing.assert_close(primal.detach(), full)
                        torch.testing.assert_close(tangent.detach(), direction)
                        (gradient,) = torch.autograd.grad(
                            (forward_ad.unpack_dual(moved).primal * x.detach()).sum(), x
                        )
                        assert_full(gradient, full)
        maximum = DTensor.from_local(full, mesh, [Partial("max")] * mesh.ndim)
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="not linear"):
            forward_ad.make_dual(maximum, maximum).redistribute(placements=[Replicate()] * mesh.ndim)


@pytest.mark.parametrize("name", REFUSED)
@on_ranks()
def test_what_one_device_refuses(name):
    """On every rank, with the same error, however often."""
    with pytest.raises(Exception) as expected:
        REFUSED[name](values(8, 3))
    for mesh in meshes():
        for placements in placements_of(values(8, 3), mesh, partial=False):
            x = tessera.distribute_tensor(values(8, 3), mesh, placements)
            for _ in range(2):
                with pytest.raises(expected.type) as error:
                    REFUSED[name](x)
                if not name.startswith("a range"):  # those of random numbers have words of their own
                    assert str(error.value).splitlines()[0] == str(expected.value).splitlines()[0]


@pytest.mark.parametrize("operator", ["gather", "scatter_add", "index_add", "index_select", "index_copy"])
@on_ranks()
def test_indices_out_of_range(operator):
    mesh = meshes()[0]
    index = torch.full((8, 3), 9) if operator in ("gather", "scatter_add") else torch.full((8,), 9)
    arguments = [] if operator in ("gather", "index_select") else [values(8, 3)]
    with pytest.raises(Exception) as expected:
        getattr(values(8, 3), operator)(0, index, *arguments)
    x = tessera.distribute_tensor(values(8, 3), mesh, [Shard(0)])
    with pytest.raises(expected.type, match="range|bounds"), implicit_replication():
        getattr(x, operator)(0, index, *arguments)


@on_ranks()
def test_integers_wrap_as_on_one_device():
    """Also if they are sums that have yet to be reduced."""
    for mesh in meshes():
        for dtype in (torch.int8, torch.uint8, torch.int32):
            full = torch.full((8,), torch.iinfo(dtype).max - 3, dtype=dtype)
            x = tessera.distribute_tensor(full, mesh, [Shard(0)] * mesh.ndim)
            assert_full(torch.trapezoid(x), torch.trapezoid(full))
            for operator in (
                lambda t: t * 0.5,
                lambda t: t / 2,
                lambda t: t + 0.5,
                lambda t: t * t.to(torch.int64),
                lambda t: t.sum(),
                lambda t: t.cumsum(0),
                lambda t: t.to(torch.float64),
                lambda t: t.sum(dtype=torch.float32),
            ):
                total = tessera.distribute_tensor(full.view(4, 2), mesh, [Shard(0)] * mesh.ndim).sum(
                    0, dtype=dtype
                )
                assert total.placements == (Partial(),) * mesh.ndim
                assert_full(operator(total), operator(full.view(4, 2).sum(0, dtype=dtype)))


MODES = {
    "": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
}


@pytest.mark.parametrize("mode", MODES)
@on_ranks()
def test_pooling_of_sequences_that_need_no_gradients(mode):
    for mesh in meshes():
        full = values(4, 6, 16)
        for placements in placements_of(full, mesh):
            with MODES[mode]():
                x = tessera.distribute_tensor(full, mesh, placements)
                assert_full(F.max_pool1d(x, 3, padding=1), F.max_pool1d(full, 3, padding=1))


def _samples(x, dims):
    """Of batches and channels, where windows begin."""
    full = torch.full((*x.shape[:2], dims) if dims == 2 else (1, x.shape[0], dims), 0.3)
    return (
        tessera.distribute_tensor(full, x.device_mesh, [Replicate()] * 2) if isinstance(x, DTensor) else full
    )


POOLING = {
    "max_pool1d": lambda x: F.max_pool1d(x[0], 2),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "max_pool3d": lambda x: F.max_pool3d(x, 2),
    "avg_pool1d": lambda x: F.avg_pool1d(x[0], 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "avg_pool3d": lambda x: F.avg_pool3d(x, 2),
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x[0], 3),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 3),
    "adaptive_max_pool3d": lambda x: F.adaptive_max_pool3d(x, 2),
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x[0], 3),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 3),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x, 2),
    "lp_pool1d": lambda x: F.lp_pool1d(x[0], 2, 2),
    "lp_pool2d": lambda x: F.lp_pool2d(x, 2, 2),
    "lp_pool3d": lambda x: F.lp_pool3d(x, 2, 2),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x, 2, 3, _random_samples=_samples(x, 2)),
    "fractional_max_pool3d": lambda x: F.fractional_max_pool3d(x, 2, 2, _random_samples=_samples(x, 3)),
    "max_unpool2d": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "local_response_norm": lambda x: F.local_response_norm(x, 2),
    "reflection_pad": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "replication_pad": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
}


@pytest.mark.parametrize("name", POOLING)
@on_ranks()
def test_double_backward_through_pooling(name):
    mesh = meshes()[1]
    for placements in ([Shard(0), Replicate()], [Shard(1), Shard(2)], [Shard(3), Shard(0)]):
        for power in (1, 2):  # with 1, of nothing but zeros
            gradients = []
            for x in (values(4, 4, 6, 6), tessera.distribute_tensor(values(4, 4, 6, 6), mesh, placements)):
                x.requires_grad_()
                (first,) = torch.autograd.grad((POOLING[name](x) ** power).sum(), x, create_graph=True)
                (first**2).sum().backward()
                gradients.append(x.grad)
            assert_full(gradients[1], gradients[0], rtol=1e-3, atol=1e-4)


@on_ranks()
def test_a_view_of_what_changes_its_shape_in_place():
    for mesh in meshes():
        for placements in placements_of(values(8, 6), mesh, partial=False):
            full, x = values(8, 6), tessera.distribute_tensor(values(8, 6), mesh, placements)
            views = []
            for a in (full, x):
                view = a[1:3]
                a.t_()
                view.zero_()
                views.append(view)
            assert_full(x, full)
            full.add_(1)
            x.add_(1)
            assert_full(views[1], views[0])


@on_ranks()
def test_writes_through_a_diagonal_of_what_was_expanded():
    for mesh in meshes():
        for placements in placements_of(values(8, 1), mesh, partial=False):
            full, x = values(8, 1), tessera.distribute_tensor(values(8, 1), mesh, placements)
            for a in (full, x):
                a.expand(8, 8).diagonal().mul_(2)
            assert_full(x, full)


@pytest.mark.parametrize("layer", [torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM])
@on_ranks()
def test_packed_sequences(layer):
    lengths = torch.tensor([2, 5, 1, 3])
    for mesh in meshes():
        for placements in placements_of(values(4, 5, 3), mesh, partial=False):
            results = []
            for distribute in (lambda t: t, lambda t: tessera.distribute_tensor(t, mesh, placements)):
                module = layer(3, 4)
                with torch.no_grad():
                    for index, parameter in enumerate(module.parameters()):
                        parameter.copy_(values(*parameter.shape, seed=index))
                x = distribute(values(4, 5, 3)).requires_grad_()
                if isinstance(x, DTensor):
                    tessera.distribute_module(module, mesh)
                with implicit_replication():  # for the first hidden state, which the layer makes
                    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
                    y, back = pad_packed_sequence(module(packed)[0], batch_first=True, padding_value=7.0)
                assert torch.equal(back, lengths)
                (y**2).sum().backward()
                results.append([y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())])
            for ours, theirs in zip(results[1], results[0], strict=True):
                assert_full(ours, theirs, rtol=1e-3, atol=1e-4)


@on_ranks()
def test_no_sparse_tensors():
    x = tessera.distribute_tensor(values(4, 4), meshes()[0], [Shard(0)])
    for make in (x.to_sparse, x.to_sparse_csr):
        with pytest.raises(RuntimeError, match="to_sparse.*layout.*full_tensor"):
            make()


@on_ranks()
def test_deep_copies_share_memory_as_what_they_are_copies_of():
    for mesh in meshes():
        for placements in placements_of(values(8, 6), mesh, partial=False):
            for order in ((0, 1, 2, 3, 4), (4, 2, 1, 3, 0)):
                results = []
                for a in (values(8, 6), tessera.distribute_tensor(values(8, 6), mesh, placements)):
                    tensors = [a, a[1:5], a[:, 2:4], a[1:5][2], a.t()]
                    made = dict(zip(order, copy.deepcopy([tensors[index] for index in order])))
                    made[1].zero_()
                    made[2].add_(3)
                    made[3].mul_(2)
                    made[4].sub_(1)
                    results.append([*tensors, *(made[index] for index in range(5))])
                for ours, theirs in zip(results[1], results[0]):
                    assert_full(ours, theirs)


@on_ranks()
def test_parametrizations_of_a_distributed_weight():
    class Symmetric(torch.nn.Module):
        def forward(self, x):
            return x.triu() + x.triu(1).mT

        def right_inverse(self, x):
            return x.triu()

    def symmetric(module):
        parametrize.register_parametrization(module, "weight", Symmetric())

    for mesh in meshes():
        for register in (symmetric, parametrizations.weight_norm):
            results = []
            for distribute in (
                lambda t: t,
                lambda t: tessera.distribute_tensor(t, mesh, [Shard(0)] * mesh.ndim),
            ):
                module = torch.nn.Linear(8, 8, bias=False)
                module.weight = torch.nn.Parameter(distribute(values(8, 8)))
                register(module)
                y = module(distribute(values(4, 8, seed=1)))
                (y**2).sum().backward()
                results.append([y.detach(), *(parameter.grad for parameter in module.parameters())])
                parametrize.remove_parametrizations(module, "weight")
                results[-1].append(module.weight.detach())
            for ours, theirs in zip(results[1], results[0], strict=True):
                assert_full(ours, theirs, rtol=1e-3, atol=1e-4)


WRITES = {
    "copy_": lambda cache, x: cache[:, 2:5].copy_(x),
    "setitem": lambda cache, x: cache.__setitem__((slice(None), slice(2, 5)), x),
    "index": lambda cache, x: cache.__setitem__((slice(None), torch.tensor([5, 0, 3])), x),
    "index_copy_": lambda cache, x: cache.index_copy_(1, torch.tensor([5, 0, 3]), x),
    "scatter_": lambda cache, x: cache.scatter_(
        1, torch.tensor([[0, 1, 2]]).repeat(4, 1)[:, :, None].repeat(1, 1, 2), x
    ),
    "add_": lambda cache, x: cache[:, :3].add_(x),
}


@pytest.mark.parametrize("name", WRITES)
@on_ranks()
def test_writes_into_plain_tensors(name):
    """As models do that keep plain caches of their own."""
    expected = torch.zeros(4, 6, 2)
    WRITES[name](expected, values(4, 3, 2))
    for mesh in meshes():
        for placements in placements_of(values(4, 3, 2), mesh):
            x = tessera.distribute_tensor(values(4, 3, 2), mesh, placements)
            for mode in (torch.no_grad, torch.inference_mode):
                with mode(), implicit_replication():
                    cache = torch.zeros(4, 6, 2)
                    assert not isinstance(WRITES[name](cache, x), DTensor)
                torch.testing.assert_close(cache, expected)
            with pytest.raises(ValueError, match="plain tensor.*written.*full_tensor.*implicit_replication"):
                WRITES[name](cache, x)


@on_ranks()
def test_gradients_of_tensors_that_cat_leaves_out():
    for mesh in meshes():
        x = tessera.distribute_tensor(values(4, 3), mesh, [Shard(0)] * mesh.ndim).requires_grad_()
        empty = tessera.distribute_tensor(torch.empty(0), mesh).requires_grad_()
        (torch.cat([empty, x, empty * 2]).sum() + (empty * 3).sum()).backward()
        assert_full(empty.grad, torch.empty(0))
        assert_full(x.grad, torch.ones(4, 3))


TRANSFORMS = {
    "jvp": lambda function, x, v: torch.func.jvp(function, (x,), (v,))[1],
    "vjp": lambda function, x, v: torch.func.vjp(function, x)[1](v)[0],
    "jvp of vjp": lambda function, x, v: torch.func.jvp(
        lambda y: torch.func.vjp(function, y)[1](v)[0], (x,), (v,)
    )[1],
    "vjp of vjp": lambda function, x, v: torch.func.vjp(lambda y: torch.func.vjp(function, y)[1](v)[0], x)[1](
        v
    )[0],
    "grad of jvp": lambda function, x, v: torch.func.grad(
        lambda y: torch.func.jvp(function, (y,), (v,))[1].sum()
    )(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func_through_placements(name):
    """Redistributed, to local tensors and back, inside a transform of torch.func."""
    full, direction = values(8, 4), values(8, 4, seed=1)
    expected = TRANSFORMS[name](lambda t: t * t.sin(), full, direction)
    kinds = (Replicate(), Shard(0), Shard(1))

    def through(target, t):
        mesh = t.device_mesh
        moved = (t * 1).redistribute(mesh, placements=target)
        assert moved.placements == tuple(target)
        local = moved.to_local()
        again = DTensor.from_local(local * local.sin(), mesh, target, shape=full.shape)
        return again.redistribute(placements=t.placements)

    def main():
        for mesh in meshes():
            for placements, target in itertools.permutations([[kind] * mesh.ndim for kind in kinds], 2):
                x, v = (tessera.distribute_tensor(each, mesh, placements) for each in (full, direction))
                assert_full(TRANSFORMS[name](functools.partial(through, target), x, v), expected)

    tessera.run(4, main, timeout=60)


@on_ranks()
def test_torch_func_says_what_it_cannot():
    mesh = meshes()[0]
    x = tessera.distribute_tensor(values(8, 4), mesh, [Shard(0)])
    maximum = DTensor.from_local(values(8, 4), mesh, [Partial("max")])
    with pytest.raises(RuntimeError, match="not linear"):
        torch.func.jvp(lambda t: t.redistribute(placements=[Replicate()]), (maximum,), (maximum,))
    with pytest.raises(NotImplementedError, match="outside of vmap"):
        torch.func.vmap(lambda t: t.redistribute(placements=[Replicate()]), in_dims=1)(x)
    with pytest.raises(AttributeError, match="not distributed"):
        torch.func.vjp(lambda t: t.placements, values(3))
    with pytest.raises(RuntimeError, match="distributed already"):
        torch.func.vjp(lambda t: DTensor.from_local(t, mesh, [Replicate()]), x)


@on_ranks()
def test_what_is_repeated_no_times_has_a_distributed_gradient():
    for mesh in meshes():
        x = tessera.distribute_tensor(values(4, 6), mesh, [Shard(0)] * mesh.ndim).requires_grad_()
        x.tile(0, 2).sum().backward()
        assert isinstance(x.grad, DTensor)
        assert_full(x.grad, torch.zeros(4, 6))


@on_ranks()
def test_local_tensors_that_are_conjugated_or_negated_lazily():
    """The memory of a local tensor holds its values: a DTensor does not say that it does not."""
    full = torch.complex(values(4, 6), values(4, 6).t().reshape(4, 6))
    for mesh in meshes():
        conjugated = DTensor.from_local(full.conj(), mesh, [Replicate()] * mesh.ndim)
        assert_full(torch.isreal(conjugated), torch.isreal(full))
        assert_full(torch.view_as_real(conjugated), torch.view_as_real(full.conj().resolve_conj()))
        negated = DTensor.from_local(full.conj().imag, mesh, [Replicate()] * mesh.ndim)
        assert_full(negated * 2, full.imag * -2)


@pytest.mark.parametrize("name", ["nextafter_", "copysign_"])
@on_ranks()
def test_gradients_of_what_is_combined_in_place_are_distributed(name):
    for mesh in meshes():
        x, y = (
            tessera.distribute_tensor(values(4, 6, seed=seed), mesh, [Shard(0)] * mesh.ndim).requires_grad_()
            for seed in (1, 2)
        )
        getattr(x * 1, name)(y).sum().backward()
        assert isinstance(x.grad, DTensor) and isinstance(y.grad, DTensor)
        assert_full(y.grad, torch.zeros(4, 6))
