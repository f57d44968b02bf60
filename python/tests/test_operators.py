"""Operators that once were refused or wrong, each against one device."""

from collections.abc import Callable

import pytest
import torch
from ranks import assert_full, meshes, on_ranks, placements_of, values
from tessera.experimental import implicit_replication

import tessera
from tessera import Replicate, Shard

Function = Callable[[torch.Tensor], torch.Tensor]


def check_everywhere(
    function: Function, tensor: torch.Tensor, partial: bool = True, **tolerance: float
) -> None:
    """It gives on every placement what it gives on one device."""
    expected = function(tensor)
    for mesh in meshes():
        for placements in placements_of(tensor, mesh, partial):
            distributed = tessera.distribute_tensor(
                tensor, mesh, [Replicate()] * mesh.ndim, src_data_rank=None
            )
            assert_full(function(distributed.redistribute(placements=placements)), expected, **tolerance)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.masked.mean(x, dim=0),
        lambda x: torch.masked.var(x, dim=1),
        lambda x: torch.masked.std(x, dim=0, keepdim=True),
    ],
)
@on_ranks()
def test_masked_reductions_count_what_they_reduce(function: Function) -> None:
    check_everywhere(function, values(5, 3))


@on_ranks()
def test_unravel_index() -> None:
    check_everywhere(
        lambda x: torch.stack(torch.unravel_index(x, (3, 4))), torch.tensor([0, 11, 5, 7, 3]), partial=False
    )


@on_ranks()
def test_bags_of_equal_size() -> None:
    weight, index = values(5, 3), torch.tensor([[0, 4], [2, 2], [1, 3]])
    expected = torch.nn.functional.embedding_bag(index, weight)
    for mesh in meshes():
        indices = tessera.distribute_tensor(index, mesh, [Shard(0)] * mesh.ndim)
        for placements in placements_of(weight, mesh, partial=False):
            assert_full(
                torch.nn.functional.embedding_bag(
                    indices, tessera.distribute_tensor(weight, mesh, placements)
                ),
                expected,
            )


@on_ranks()
def test_fractional_pooling_draws_the_same_on_all_ranks() -> None:
    image = values(2, 3, 9, 9)
    for mesh in meshes():
        x = tessera.distribute_tensor(image, mesh, [Shard(0)] * mesh.ndim)
        pooled, indices = torch.nn.functional.fractional_max_pool2d(x, 2, output_size=4, return_indices=True)
        full = indices.full_tensor()
        assert full.shape == (2, 3, 4, 4)
        assert_full(pooled, image.flatten(2).gather(2, full.flatten(2)).reshape(2, 3, 4, 4))
        first = tessera.distribute_tensor(full, mesh, [Replicate()] * mesh.ndim)
        assert torch.equal(first.full_tensor(), full)


@on_ranks()
def test_low_rank_approximations() -> None:
    matrix = values(9, 2) @ values(2, 6, seed=1)
    for mesh in meshes():
        u, s, v = torch.svd_lowrank(tessera.distribute_tensor(matrix, mesh, [Shard(0)] * mesh.ndim), q=2)
        assert_full(u @ torch.diag(s) @ v.T, matrix, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_was_replaced_is_still_compiled_by_torchscript() -> None:
    script = torch.jit.script(torch.nn.EmbeddingBag(5, 3))
    assert script(torch.tensor([[0, 1]])).shape == (1, 3)
    pool = torch.jit.script(torch.nn.FractionalMaxPool2d(2, output_size=2))
    assert pool(torch.rand(1, 1, 4, 4)).shape == (1, 1, 2, 2)


@on_ranks()
def test_reshape_of_transposed_tensors() -> None:
    check_everywhere(lambda x: x.transpose(-1, -2).reshape(10, 4), values(5, 4, 2))
    check_everywhere(lambda x: x.transpose(0, 1).reshape(-1), values(5, 3))
    check_everywhere(lambda x: x.transpose(-1, -2).expand(2, 5, 3).reshape(10, 3), values(1, 3, 5))


@on_ranks()
def test_reshape_in_inference_mode() -> None:
    with torch.inference_mode():
        check_everywhere(lambda x: x.transpose(-1, -2).reshape(10, 4), values(5, 4, 2))


@on_ranks()
def test_products_of_batches_of_unequal_dims() -> None:
    other = values(4, 4, 5, 2, seed=1)
    expected = values(4, 3, 2) @ other.mT
    for mesh in meshes():
        x = tessera.distribute_tensor(values(4, 3, 2), mesh, [Shard(0)] * mesh.ndim)
        for placements in placements_of(other, mesh, partial=False):
            assert_full(x @ tessera.distribute_tensor(other, mesh, placements).mT, expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.combinations(x[:, 0], 2),
        lambda x: torch.quantile(x, 0.3, dim=0),
        lambda x: torch.quantile(x, 0.3),
        lambda x: torch.linalg.matrix_power(x[:3], 0),
        lambda x: torch.linalg.matrix_power(x[:3], 3),
        lambda x: torch.linalg.matrix_rank(x),
        lambda x: torch.nn.functional.scaled_dot_product_attention(
            x[None], x[None] + 1, x[None], is_causal=True
        ),
    ],
)
@on_ranks()
def test_composites_with_constants(function: Function) -> None:
    check_everywhere(function, values(5, 3))


@on_ranks()
def test_composites_still_refuse_plain_tensors_of_the_caller() -> None:
    x = tessera.distribute_tensor(values(1, 5, 3), meshes()[0], [Shard(1)])
    with pytest.raises(ValueError, match="plain tensor"):
        torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=values(5, 5))


@on_ranks()
def test_one_hot() -> None:
    index = torch.tensor([[0, 4], [2, 2], [1, 3]])
    check_everywhere(torch.nn.functional.one_hot, index, partial=False)
    check_everywhere(lambda x: torch.nn.functional.one_hot(x, 7), index, partial=False)
    distributed = tessera.distribute_tensor(index, meshes()[0], [Shard(0)])
    with pytest.raises(RuntimeError, match="from 0 to 4, but must be from 0 to 3"):
        torch.nn.functional.one_hot(distributed, 4)


@pytest.mark.parametrize("split", [torch.tensor(3), torch.tensor([1, 4])])
@on_ranks()
def test_tensor_split_by_a_tensor(split: torch.Tensor) -> None:
    tensor = values(5, 3)
    for mesh in meshes():
        replicated = tessera.distribute_tensor(split, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
        for placements in placements_of(tensor, mesh, partial=False):
            parts = torch.tensor_split(tessera.distribute_tensor(tensor, mesh, placements), replicated)
            for part, expected in zip(parts, torch.tensor_split(tensor, split), strict=True):
                assert_full(part, expected)


@pytest.mark.parametrize(
    "function", [torch.trace, torch.linalg.matrix_exp, lambda x: torch.linalg.matrix_exp(x).pow(2)]
)
@on_ranks()
def test_gradients_that_begin_with_zeros(function: Function) -> None:
    tensor = values(5, 5) / 4
    plain = tensor.clone().requires_grad_()
    function(plain).sum().backward()
    assert plain.grad is not None
    for mesh in meshes():
        for placements in placements_of(tensor, mesh, partial=False):
            x = tessera.distribute_tensor(tensor, mesh, placements).requires_grad_()
            function(x).sum().backward()
            assert_full(x.grad, plain.grad)


@pytest.mark.parametrize(
    "function",
    [
        torch.linalg.inv,
        torch.linalg.det,
        torch.linalg.svdvals,
        lambda x, out: torch.matmul(x, x, out=out),
        lambda x, out: torch.kron(x, x, out=out),
        lambda x, out: torch.msort(x, out=out),
        lambda x, out: torch._C._nn.log_sigmoid(x, out=out),
    ],
)
@on_ranks()
def test_out_of_composites(function: Callable[..., torch.Tensor]) -> None:
    tensor = values(3, 3)
    expected = function(tensor, out=torch.empty(0))
    for mesh in meshes():
        for placements in placements_of(tensor, mesh):
            x = tessera.distribute_tensor(tensor, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
            for target in placements_of(expected, mesh, partial=False):
                out = tessera.distribute_tensor(torch.zeros_like(expected), mesh, target, src_data_rank=None)
                function(x.redistribute(placements=placements), out=out)
                assert out.placements == target
                assert_full(out, expected, rtol=1e-4, atol=1e-5)


@on_ranks()
def test_ctc_loss_with_lengths_in_tensors() -> None:
    log_probs, targets = values(7, 2, 4).log_softmax(-1), torch.tensor([[1, 2, 3], [3, 1, 1]])
    lengths = torch.tensor([7, 6]), torch.tensor([3, 2])
    expected = torch.nn.functional.ctc_loss(log_probs, targets, *lengths)
    for mesh in meshes():
        full = [
            tessera.distribute_tensor(each, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
            for each in (targets, *lengths)
        ]
        for placements in placements_of(log_probs, mesh, partial=False):
            assert_full(
                torch.nn.functional.ctc_loss(tessera.distribute_tensor(log_probs, mesh, placements), *full),
                expected,
            )


@on_ranks()
def test_indices_that_are_lists() -> None:
    check_everywhere(lambda x: x[[0, 2, 4]], values(5, 3))
    check_everywhere(lambda x: x[:, [0, 2]], values(5, 3))
    check_everywhere(lambda x: x[[0, 4], [2, 1]], values(5, 3))

    def written(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[[0, 4]] = 7
        return x

    check_everywhere(written, values(5, 3))


@pytest.mark.parametrize("shape", [(), (1,)])
@on_ranks()
def test_addmv_broadcasts_over_empty_shards(shape: tuple[int, ...]) -> None:
    vector, bias = values(3, seed=1), values(*shape, seed=2)
    expected = torch.addmv(bias, values(5, 3), vector)
    for mesh in meshes():
        full = [
            tessera.distribute_tensor(each, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
            for each in (bias, vector)
        ]
        for placements in placements_of(values(5, 3), mesh, partial=False):
            assert_full(
                torch.addmv(full[0], tessera.distribute_tensor(values(5, 3), mesh, placements), full[1]),
                expected,
            )


@pytest.mark.parametrize("training", [True, False])
@on_ranks()
def test_batch_norm_of_fewer_channels_than_ranks(training: bool) -> None:
    def normalised(image: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> list[torch.Tensor]:
        result = torch.nn.functional.batch_norm(image, mean, variance, training=training)
        (gradient,) = torch.autograd.grad(result.square().sum(), image)
        return [result, gradient, mean, variance]

    image, mean, variance = values(3, 5, 2), values(5, seed=1), values(5, seed=2).abs()
    expected = normalised(image.clone().requires_grad_(), mean.clone(), variance.clone())
    for mesh in meshes():
        for placements in placements_of(image, mesh, partial=False):
            x = tessera.distribute_tensor(image, mesh, placements).requires_grad_()
            for target in ([Replicate()] * mesh.ndim, [Shard(0)] * mesh.ndim):
                moments = [tessera.distribute_tensor(each.clone(), mesh, target) for each in (mean, variance)]
                for got, wanted in zip(normalised(x, *moments), expected, strict=True):
                    assert_full(got.detach(), wanted.detach(), rtol=1e-4, atol=1e-5)


@on_ranks()
def test_decompositions_of_which_a_part_is_not_wanted() -> None:
    matrices = values(3, 4, 4) + 4 * torch.eye(4)
    check_everywhere(lambda x: torch.linalg.eigvalsh(x @ x.mT), matrices, rtol=1e-4, atol=1e-4)
    check_everywhere(lambda x: torch.linalg.qr(x, mode="r").R.abs(), matrices, rtol=1e-4, atol=1e-4)
    check_everywhere(lambda x: torch.linalg.qr(x, mode="r").Q, matrices)


@pytest.mark.parametrize("heads, groups", [(8, 4), (4, 2), (8, 1), (6, 3)])
@pytest.mark.parametrize("causal", [True, False])
@on_ranks()
def test_attention_whose_queries_share_keys(heads: int, groups: int, causal: bool) -> None:
    """Sharded along heads without communication where ranks hold heads that go together; right in any case."""
    full = [values(2, heads, 5, 4), values(2, groups, 5, 4, seed=1), values(2, groups, 5, 4, seed=2)]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=causal, enable_gqa=True
        )

    plain = [tensor.clone().requires_grad_() for tensor in full]
    expected = attend(*plain)
    expected.pow(2).sum().backward()
    for mesh in meshes():
        for placements in placements_of(full[0], mesh, partial=False):
            ours = [tessera.distribute_tensor(tensor, mesh, placements).requires_grad_() for tensor in full]
            shards = [mesh.shape[dim] for dim, placement in enumerate(placements) if placement == Shard(1)]
            is_free = (
                set(placements) <= {Replicate(), Shard(0), Shard(1)}
                and groups % torch.Size(shards).numel() == 0
                and placements[1:] != placements[:-1]
            )
            with tessera.implicit_communication("forbidden" if is_free else "allowed"):
                result = attend(*ours)
                loss = result.pow(2).sum()
                loss.backward()
            assert_full(result, expected.detach(), rtol=1e-4, atol=1e-5)
            for mine, other in zip(ours, plain):
                assert_full(mine.grad, other.grad, rtol=1e-4, atol=1e-4)


@on_ranks()
def test_blocks_that_are_cut_one_by_one() -> None:
    """They are taken out of a strided shard, and joined to one, without communication; gradients too."""
    full = values(3, 24)
    plain = full.clone().requires_grad_()

    def function(x: torch.Tensor) -> torch.Tensor:
        a, b, c = x.split(8, dim=1)
        return torch.cat([c * 2, a, b.relu()], dim=1)

    expected = function(plain)
    weights = values(3, 24, seed=1)
    (expected * weights).sum().backward()
    strided = tessera._StridedShard(1, split_factor=3)
    cases = [
        (mesh, [strided]) if mesh.ndim == 1 else (mesh, [other, strided])
        for mesh in meshes()
        for other in (Replicate(), Shard(0))
    ]
    for mesh, placements in cases:
        x = tessera.distribute_tensor(full, mesh, placements).requires_grad_()
        placed = tessera.distribute_tensor(weights, mesh, placements)
        with tessera.implicit_communication("forbidden"):
            assert x[:, 8:16].placements == tuple(
                Shard(1) if each == strided else each for each in placements
            )
            y = function(x)
            (y * placed).sum().backward()
        assert y.placements == x.grad.placements == tuple(placements)
        assert_full(y, expected.detach())
        assert_full(x.grad, plain.grad)
    # Ranges that are no block, and sizes that are not even.
    for mesh, placements in cases:
        for size, split in ((24, 2), (24, 4), (10, 2), (9, 3)):
            x = values(3, size)
            ours = tessera.distribute_tensor(
                x, mesh, [*placements[:-1], tessera._StridedShard(1, split_factor=split)]
            )
            for begin, end, step in (
                (0, 8, 1),
                (1, 9, 1),
                (0, 5, 1),
                (3, 6, 1),
                (0, size // 2, 1),
                (0, size, 2),
            ):
                assert_full(ours[:, begin:end:step], x[:, begin:end:step])
            view = ours[:, : size // 2]
            view += 1
            written = x.clone()
            written[:, : size // 2] += 1
            assert_full(ours, written)


@on_ranks()
def test_joining_what_is_cut() -> None:
    for mesh in meshes():
        for sizes in ((8, 8), (4, 4, 4), (5, 5), (8, 4)):
            parts = [values(3, size, seed=number) for number, size in enumerate(sizes)]
            for placements in placements_of(parts[0], mesh, partial=False):
                plain = [part.clone().requires_grad_() for part in parts]
                ours = [tessera.distribute_tensor(part, mesh, placements).requires_grad_() for part in parts]
                expected = torch.cat(plain, 1)
                result = torch.cat(ours, 1)
                assert_full(result, expected.detach())
                expected.pow(2).sum().backward()
                result.pow(2).sum().backward()
                for mine, other in zip(ours, plain):
                    assert_full(mine.grad, other.grad)
                # It is used with others as any tensor.
                assert_full(
                    result.view(3, -1, 2) + tessera.distribute_tensor(expected.detach().view(3, -1, 2), mesh),
                    expected.detach().view(3, -1, 2) * 2,
                )


@pytest.mark.parametrize("hermitian", [False, True])
@on_ranks()
def test_autocast_casts_what_kernels_call(hermitian: bool) -> None:
    """pinv is no operator that autocast knows, but the product that its kernel ends with is."""
    matrix = values(2, 4, 4) + values(2, 4, 4).mT

    def inverse(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.linalg.pinv(x, hermitian=hermitian)

    assert inverse(matrix).dtype == torch.bfloat16
    check_everywhere(inverse, matrix, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@on_ranks()
def test_scaled_products_in_autocast(dtype: torch.dtype) -> None:
    a, b, one = values(15, 16).to(dtype), values(32, 16, seed=1).to(torch.float8_e4m3fn), torch.tensor(1.5)
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch._scaled_mm(a, b.t(), one, one).float()
        for mesh in meshes():
            for placements in placements_of(a, mesh, partial=False):
                x, y = (tessera.distribute_tensor(each, mesh, placements) for each in (a, b))
                out = tessera.zeros(15, 32, dtype=dtype, device_mesh=mesh, placements=placements)
                torch._scaled_mm(x, y.t(), one, one, out=out)
                for result in (torch._scaled_mm(x, y.t(), one, one), out):
                    assert result.dtype == dtype
                    assert_full(result.float(), expected, rtol=0, atol=0)


@on_ranks()
def test_trapezoids_of_nothing() -> None:
    for mesh in meshes():
        for shape in ((0,), (3, 0)):
            y = torch.empty(shape)
            x = tessera.distribute_tensor(y, mesh, [Shard(0)] * mesh.ndim)
            with implicit_replication():
                for function in (torch.trapezoid, torch.trapz):
                    for result in (function(y, x), function(x, y), function(x, x), function(x)):
                        assert_full(result, function(y))


@on_ranks()
def test_strides_of_dims_of_size_one_do_not_matter() -> None:
    """A kernel asks for that of new memory. The operator has no rule."""
    a, b = (values(15, 16, seed=seed).to(torch.float8_e4m3fn) for seed in (0, 1))
    of_rows = torch.arange(1.0, 16.0)

    def product(x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm_v2(x, y.t(), [rows], [1], [0], [columns], [1], [0], None, torch.bfloat16)

    expected = product(a, b, of_rows.view(15, 1), of_rows.view(1, 15))
    for mesh in meshes():
        for placements in placements_of(of_rows.view(1, 15), mesh):
            x, y = (tessera.distribute_tensor(each, mesh, [Shard(0)] * mesh.ndim) for each in (a, b))
            scale = tessera.distribute_tensor(of_rows.view(1, 15), mesh, [Replicate()] * mesh.ndim)
            scale = scale.redistribute(placements=placements)
            assert scale.t().stride() == (1, 15)
            assert_full(product(x, y, scale.t(), scale), expected)
