"""What programs written for torch.distributed.tensor rely on, besides its names."""

import io
import itertools
import pickle
import subprocess
import sys

import pytest
import torch
from ranks import assert_full, on_ranks, values
from tessera.experimental import implicit_replication
from tessera.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

import tessera
from tessera import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from tessera.debug import CommDebugMode


@on_ranks()
def test_a_plain_tensor_of_one_element_is_a_scalar():
    mesh = init_device_mesh("cpu", (4,))
    weights = [
        torch.nn.Parameter(values(6, 5)),
        torch.nn.Parameter(distribute_tensor(values(6, 5), mesh, [Shard(0)])),
    ]
    for weight in weights:
        weight.grad = (
            values(6, 5, seed=1)
            if weight is weights[0]
            else distribute_tensor(values(6, 5, seed=1), mesh, [Shard(0)])
        )
        torch.optim.Adam([weight], lr=torch.tensor([0.1]), fused=True).step()
    assert_full(weights[1], weights[0].detach())
    x = distribute_tensor(values(6, 5), mesh, [Shard(0)])
    assert_full(x * torch.tensor([2.0]), values(6, 5) * 2)
    with pytest.raises(ValueError, match="plain tensor"):
        x * torch.ones(5)


@on_ranks()
def test_a_gradient_that_is_not_there_is_no_error():
    mesh = init_device_mesh("cpu", (4,))

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.set_materialize_grads(False)
            return x * 2, y * 3

        @staticmethod
        def backward(ctx, first, second):
            assert second is None
            return first * 2, second

    x, y = values(4, 4).requires_grad_(), values(4, 4).requires_grad_()
    for make in (
        lambda local: DTensor.from_local(local, mesh, [Replicate()]),
        lambda local: DTensor.from_local(local, mesh, [Replicate()]).redistribute(placements=[Shard(0)]),
    ):
        x.grad = None
        Twice.apply(make(x), make(y))[0].sum().backward()
        assert torch.equal(x.grad, torch.full((4, 4), 2.0)) and y.grad is None


@on_ranks()
def test_run_check_notices_who_requires_grad():
    mesh = init_device_mesh("cpu", (4,))
    local = values(3, 3).requires_grad_(tessera.get_rank() != 0)
    with pytest.raises(ValueError, match="requires grad"):
        DTensor.from_local(local, mesh, [Shard(0)], run_check=True)
    DTensor.from_local(local, mesh, [Shard(0)])


@on_ranks()
def test_the_local_tensor_of_a_parameter_is_one():
    mesh = init_device_mesh("cpu", (4,))
    parameter = torch.nn.Parameter(distribute_tensor(values(8, 3), mesh, [Shard(0)]))
    local = parameter.to_local()
    assert isinstance(local, torch.nn.Parameter) and local.requires_grad
    local.sum().backward()
    assert_full(parameter.grad, torch.ones(8, 3))
    with torch.no_grad():
        assert isinstance(parameter.to_local(), torch.nn.Parameter)
    assert not isinstance(parameter._local_tensor, torch.nn.Parameter)
    assert not isinstance(parameter.detach().to_local(), torch.nn.Parameter)


@on_ranks()
def test_gradients_lie_in_memory_as_their_tensors():
    mesh = init_device_mesh("cpu", (4,))
    x = values(2, 3, 11, 4).to(memory_format=torch.channels_last).requires_grad_()
    x = distribute_tensor(x, mesh, [Shard(2)])
    assert x.is_contiguous(memory_format=torch.channels_last)
    (x.to_local() * 2).sum().backward()
    assert x.grad.is_contiguous(memory_format=torch.channels_last)
    assert x.grad._local_tensor.is_contiguous(memory_format=torch.channels_last)
    assert_full(x.grad, torch.full((2, 3, 11, 4), 2.0))


@on_ranks()
def test_assert_close_compares_distributed_tensors():
    mesh = init_device_mesh("cpu", (4,))
    x, same = (distribute_tensor(values(4, 4), mesh, [Shard(0)]) for _ in range(2))
    torch.testing.assert_close(x, same)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(x, x + 1)
    with pytest.raises(AssertionError, match="placements do not match"):
        torch.testing.assert_close(x, x.redistribute(placements=[Replicate()]))
    with pytest.raises(TypeError, match="ambiguous"):
        torch.testing.assert_close(x, values(4, 4))
    torch.testing.assert_close(values(4, 4), values(4, 4))


@on_ranks()
def test_tied_embeddings_may_be_parallelised_one_after_the_other():
    mesh = init_device_mesh("cpu", (4,))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.embedding(tokens))

    model, plain = Model(), Model()
    with torch.no_grad():
        for each in (model, plain):
            each.head.weight.copy_(values(8, 4))
    parallelize_module(model, mesh, {"embedding": RowwiseParallel(input_layouts=Replicate())})
    parallelize_module(model.head, mesh, ColwiseParallel(output_layouts=Replicate()))
    model.head.weight = model.embedding.weight
    tokens = torch.tensor([0, 3, 7])
    for each in (model, plain):
        each(tokens).pow(2).sum().backward()
    torch.testing.assert_close(model(tokens), plain(tokens))
    assert_full(model.head.weight.grad, plain.head.weight.grad)


@on_ranks()
def test_the_loss_of_loss_parallel_is_replicated():
    mesh = init_device_mesh("cpu", (2, 2))
    targets = torch.arange(4)
    for placements, expected in (
        ([Replicate(), Shard(1)], (Replicate(), Replicate())),
        ([Shard(0), Shard(1)], (Partial(), Replicate())),
    ):
        logits = distribute_tensor(values(4, 8), mesh, placements).requires_grad_()
        target = distribute_tensor(targets, mesh, [placements[0], Replicate()])
        with loss_parallel():
            loss = torch.nn.functional.cross_entropy(logits, target)
        assert loss.placements == expected
        plain = values(4, 8).requires_grad_()
        torch.nn.functional.cross_entropy(plain, targets).backward()
        loss.backward()
        torch.testing.assert_close(
            loss.full_tensor(), torch.nn.functional.cross_entropy(plain, targets).detach()
        )
        assert_full(logits.grad, plain.grad)


def test_a_saved_tensor_loads_where_there_are_no_ranks(tmp_path):
    file = tmp_path / "tensor.pt"

    def save():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(values(6, 5), mesh, [Shard(0), Partial()]).requires_grad_()
        if tessera.get_rank() == 0:
            torch.save({"x": x, "mesh": mesh}, file)
            assert pickle.loads(pickle.dumps(x)).placements == x.placements

    tessera.run(4, save)
    script = f"""
import torch, tessera
for weights_only in (True, False):
    loaded = torch.load({str(file)!r}, weights_only=weights_only)
    x, mesh = loaded["x"], loaded["mesh"]
    assert x.device_mesh == mesh and mesh.shape == (2, 2) and mesh.mesh_dim_names == ("dp", "tp")
    assert x.placements == (tessera.Shard(0), tessera.Partial()) and x.shape == (6, 5) and x.stride == (5, 1)
    assert x.requires_grad and x.local_tensor.shape == (3, 5) and x.to_local() is x.local_tensor
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    # Pickles import what they need. torch loads only what it knows unless it is told: it then says what to import.
    script = f"""
import pickle, torch
assert torch.load({str(file)!r}, weights_only=False)["x"].to_local().shape == (3, 5)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    script = f"import torch; torch.load({str(file)!r}, weights_only=True)"
    refused = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert refused.returncode != 0 and "tessera._rebuild" in refused.stderr
    buffer = io.BytesIO(pickle.dumps(init_device_mesh))
    assert pickle.load(buffer) is init_device_mesh


@on_ranks()
def test_ranks_outside_of_the_mesh_compute_nothing():
    mesh = tessera.DeviceMesh("cpu", [0, 2])
    inside = tessera.get_rank() in (0, 2)
    x = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)])
    y = x + 2
    assert y.shape == (6, 4) and y.placements == (Shard(0),)
    assert torch.equal(y.to_local(), torch.full((3, 4), 3.0) if inside else torch.empty(0))
    x.mul_(0.5).add_(1.0)
    assert torch.equal(x.to_local(), torch.full((3, 4), 1.5) if inside else torch.empty(0))
    total = x.sum()
    assert total.ndim == 0 and (not inside or total.item() == 36.0)
    assert torch.equal(total.to_local(), torch.tensor(18.0 if inside else 0.0))
    assert torch.equal((total + 1).to_local(), torch.tensor(37.0 if inside else 0.0))
    assert x.equal(x)
    assert [part.shape for part in x.split([1, 3], dim=1)] == [(6, 1), (6, 3)]
    weight = torch.nn.Parameter(x.detach())
    (weight * 2).sum().backward()
    assert weight.grad.shape == (6, 4)


@on_ranks()
def test_sizes_are_compared_globally():
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(values(8, 4), mesh, [Shard(0)])
    assert x.is_same_size(values(8, 4)) and not values(2, 4).is_same_size(x) and x.is_same_size(x)


OPERATORS = {  # a function, what its arguments are, and what its result is
    "maximum": (torch.maximum, ("max", "max"), "max"),
    "maximum with a replica": (torch.maximum, ("min", None), "min"),
    "minimum": (torch.minimum, ("min", "min"), "min"),
    "neg": (torch.neg, ("max",), "min"),
    "neg of the smallest": (torch.neg, ("min",), "max"),
    "add": (torch.add, ("max", None), "max"),
    "sub": (torch.sub, ("min", None), "min"),
    "add a number": (lambda x: x + 3, ("max",), "max"),
    "exp2": (torch.exp2, ("min",), "min"),
    "erfc": (torch.erfc, ("max",), "min"),
    "logaddexp": (torch.logaddexp, (None, "max"), "max"),
    "clamp_min": (lambda x: x.clamp_min(0.1), ("max",), "max"),
    "foreach_maximum": (lambda x, y: torch._foreach_maximum([x], [y])[0], ("max", "max"), "max"),
    "foreach_neg": (lambda x: torch._foreach_neg([x])[0], ("max",), "min"),
    "foreach_exp": (lambda x: torch._foreach_exp([x])[0], ("min",), "min"),
}


@pytest.mark.parametrize("name", OPERATORS)
@on_ranks()
def test_extremes_are_found_after_the_operator(name):
    function, reductions, expected = OPERATORS[name]
    mesh = init_device_mesh("cpu", (4,))
    locals_of = [[values(4, 3, seed=10 * i + rank) for rank in range(4)] for i in range(len(reductions))]
    arguments, plain = [], []
    for held, reduction in zip(locals_of, reductions, strict=True):
        if reduction is None:
            arguments.append(distribute_tensor(held[0], mesh))
            plain.append(held[0])
        else:
            arguments.append(DTensor.from_local(held[tessera.get_rank()], mesh, [Partial(reduction)]))
            stacked = torch.stack(held)
            plain.append(stacked.amax(0) if reduction == "max" else stacked.amin(0))
    with CommDebugMode() as mode:
        result = function(*arguments)
    assert mode.get_total_counts() == 0 and result.placements == (Partial(expected),)
    assert_full(result, function(*plain))


@on_ranks()
def test_extremes_of_integers_are_found_before_they_overflow():
    mesh = init_device_mesh("cpu", (4,))
    local = torch.tensor([100 + tessera.get_rank()], dtype=torch.int8)
    x = DTensor.from_local(local, mesh, [Partial("max")])
    y = distribute_tensor(torch.tensor([25], dtype=torch.int8), mesh)
    assert (x + y).full_tensor().tolist() == [-128]


@on_ranks()
def test_sums_of_powers_stay_partial():
    mesh = init_device_mesh("cpu", (4,))
    x, y = values(10, 8), values(6, 8, seed=1)
    sharded = [distribute_tensor(each, mesh, [Shard(0)]) for each in (x, y)]
    for order in (1, 2, 3, -1):
        with CommDebugMode() as mode:
            one = torch.ops.aten.linalg__powsum(sharded[0], order)
            several = torch.ops.aten._foreach_powsum(sharded, order)
        assert mode.get_total_counts() == 0
        assert one.placements == several[0].placements == several[1].placements == (Partial(),)
        assert_full(one, (x.abs() ** order).sum(), rtol=1e-4, atol=1e-4)
        assert_full(several[1], (y.abs() ** order).sum(), rtol=1e-4, atol=1e-4)
    assert torch.linalg.vector_norm(sharded[0], 1).placements == (Partial(),)


@on_ranks()
def test_prims_stay_sharded():
    mesh = init_device_mesh("cpu", (4,))
    x = values(12, 8).abs().clamp(0.1, 3.0)
    sharded = distribute_tensor(x, mesh, [Shard(0)])
    for name in ("bessel_i0e", "erfcx", "exp", "neg", "view_of"):
        operator = getattr(torch.ops.prims, name)
        result = operator(sharded)
        assert result.placements == (Shard(0),), name
        assert_full(result, operator(x))
    assert (torch.ops.prims.div(sharded, sharded)).placements == (Shard(0),)


@on_ranks()
def test_index_put_of_sums():
    mesh = init_device_mesh("cpu", (4,))
    x = values(4, 8)
    cases = itertools.product((True, False), (torch.tensor(1), torch.tensor([1, 3])))
    for accumulate, number in cases:
        index, value = [number], values(*number.shape, 8, seed=1)
        arguments = [DTensor.from_local(each / 4, mesh, [Partial()]) for each in (x, value)]
        result = torch.index_put(arguments[0], index, arguments[1], accumulate)
        assert result.placements == (Partial(),)
        assert_full(result, torch.index_put(x, index, value, accumulate))
    for placement in (Shard(0), Shard(1), Replicate()):
        sharded = distribute_tensor(x, mesh, [placement])
        assert_full(sharded[torch.tensor(2)], x[2])
        assert_full(sharded[:, torch.tensor(-1)], x[:, -1])
        assert_full(sharded[torch.tensor(1), torch.tensor([0, 7])], x[1, [0, 7]])
        assert_full(
            torch.index_put(sharded, [torch.tensor(3)], torch.tensor(5.0)),
            torch.index_put(x, [torch.tensor(3)], torch.tensor(5.0)),
        )


@on_ranks()
def test_redistribute_places_the_gradient():
    """Also where the tensor is placed so already, as in programs that use a replica on each rank's own data."""
    mesh = init_device_mesh("cpu", (4,))
    weight = distribute_tensor(values(3, 4).requires_grad_(), mesh, [Replicate()])
    same = weight.redistribute(placements=[Replicate()])
    assert same.grad_fn is not None and same.placements == (Replicate(),)
    with CommDebugMode() as mode:
        (same.to_local(grad_placements=[Partial()]) * (tessera.get_rank() + 1)).sum().backward()
    assert mode.get_comm_counts()[torch.ops.c10d_functional.all_reduce] == mode.get_total_counts() == 1
    assert weight.grad.placements == (Replicate(),)
    assert torch.equal(weight.grad.to_local(), torch.full((3, 4), 10.0))
    with torch.no_grad():
        assert weight.redistribute(placements=[Replicate()]) is weight
    hidden = weight.sigmoid()
    hidden.redistribute(placements=[Replicate()]).add_(1)  # writes into what sigmoid saved
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        hidden.sum().backward()


@on_ranks(2)
def test_to_local_without_gradients_is_the_local_tensor():
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(values(4, 3), mesh, [Shard(0)]).requires_grad_()
    with torch.no_grad():
        local = x.to_local()
        assert local is x._local_tensor and not local.requires_grad
    assert x.to_local() is not local and x.to_local().requires_grad


@on_ranks(1)  # as warnings are caught for the process
def test_what_the_constructor_and_from_local_ask_for():
    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(values(4, 3), mesh, [Shard(0)])
    local = values(4, 3).requires_grad_()
    with pytest.warns(UserWarning, match="To construct"):
        made = DTensor(local, x._spec, requires_grad=False)
    assert made.placements == (Shard(0),) and not made.requires_grad
    with pytest.raises(RuntimeError, match="Please pass both shape and stride at the same time."):
        DTensor.from_local(local, mesh, [Shard(0)], stride=(3, 1))
    with pytest.raises(ValueError, match="Mixed Partial reduce types"):
        DTensor.from_local(local, init_device_mesh("cpu", (1, 1)), [Partial("max"), Partial("sum")])


@on_ranks(2)
def test_what_goes_to_meta_stays_distributed():
    mesh = init_device_mesh("cpu", (2,))
    for placements in ([Replicate()], [Partial()], [Shard(0)]):
        x = torch.tensor(3.0) if placements[0] != Shard(0) else values(3, 2)
        x = DTensor.from_local(x, mesh, placements)
        for moved in (x.to("meta"), torch.empty_like(x, device="meta"), torch.nn.Parameter(x).to("meta")):
            assert isinstance(moved, DTensor) and moved.is_meta and moved.shape == x.shape
            assert moved.placements == tuple(placements)
            back = torch.empty_like(moved, device="cpu")
            assert isinstance(back, DTensor) and back.device.type == "cpu"
        assert x.to("meta", torch.float64).dtype == torch.float64
        assert isinstance(torch.nn.ParameterList([torch.nn.Parameter(x)]).to("meta")[0], DTensor)


@on_ranks()
def test_the_gradient_of_what_stays_partial_may_stay_partial():
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(values(4, 3), mesh, [Partial()]).requires_grad_()
    gradient = DTensor.from_local(values(4, 3, seed=1), mesh, [Partial()])
    with CommDebugMode() as mode:
        x.redistribute(placements=[Partial()]).backward(gradient)
    assert mode.get_total_counts() == 0 and x.grad.placements == (Partial(),)
    assert_full(x.grad, 4 * values(4, 3, seed=1))
    x.grad = None
    x.redistribute(placements=[Replicate()]).backward(gradient.redistribute(placements=[Shard(0)]))
    assert x.grad.placements == (Replicate(),)
    assert_full(x.grad, 4 * values(4, 3, seed=1))


@on_ranks()
def test_groups_of_channels_are_shuffled_where_they_are():
    for mesh in (init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))):
        placements = [Shard(1)] if mesh.ndim == 1 else [Shard(0), Shard(1)]
        for groups, collectives in ((4, 0), (12, 0), (1, 0), (3, None)):
            image = values(2, 12, 3, 3)
            ours = distribute_tensor(image, mesh, placements).requires_grad_()
            with CommDebugMode() as mode:
                shuffled = torch.nn.functional.channel_shuffle(ours, groups)
            assert collectives is None or mode.get_total_counts() == collectives
            assert_full(shuffled, torch.nn.functional.channel_shuffle(image, groups))
            (shuffled * distribute_tensor(values(2, 12, 3, 3, seed=1), mesh)).sum().backward()
            image.requires_grad_()
            (
                torch.nn.functional.channel_shuffle(image, groups) * values(2, 12, 3, 3, seed=1)
            ).sum().backward()
            assert_full(ours.grad, image.grad)
    with pytest.raises(RuntimeError, match="divisible"):
        torch.nn.functional.channel_shuffle(ours, 5)


@pytest.mark.parametrize("training", [False, True])
@on_ranks()
def test_noise_of_a_rectifier_may_be_partial(training):
    mesh = init_device_mesh("cpu", (4,))
    tensors = [values(4, 4, seed=seed) for seed in range(3)]
    expected = torch.ops.aten.rrelu_with_noise_backward(*tensors, 0.1, 0.3, training, False)
    for placements in itertools.product([Replicate(), Shard(0), Partial()], repeat=3):
        placed = [
            distribute_tensor(each, mesh, [placement])
            for each, placement in zip(tensors, placements, strict=True)
        ]
        with CommDebugMode() as mode:
            result = torch.ops.aten.rrelu_with_noise_backward(*placed, 0.1, 0.3, training, False)
        assert_full(result, expected)
        read = placements[::2] if training else placements[:2]
        if set(read) <= {Replicate(), Shard(0)} or read in (
            (Partial(), Replicate()),
            (Replicate(), Partial()),
        ):
            is_linear = training or read != (Replicate(), Partial())  # in what it reads
            assert mode.get_total_counts() == 0 or not is_linear, placements


@on_ranks()
def test_operators_that_reduce_take_one_collective():
    gathers = torch.ops.c10d_functional.all_gather_into_tensor
    two = init_device_mesh("cpu", (2, 2))
    for size in (12, 5, 3):
        for mesh, placements in (
            (init_device_mesh("cpu", (4,)), [Shard(0)]),
            (two, [Shard(0), Replicate()]),
            (two, [Shard(0), Shard(0)]),
            (two, [Shard(1), Shard(0)]),
        ):
            plain = values(size, 4)
            plain[1, 1] = -torch.inf
            plain[:, 2] = -torch.inf
            ours = distribute_tensor(plain, mesh, placements).requires_grad_()
            with CommDebugMode() as mode:
                result = torch.logsumexp(ours, 0)
            assert mode.get_comm_counts() == {gathers: 1}
            assert all(Shard(0) == each or each.is_replicate() for each in result.placements)
            assert_full(result, torch.logsumexp(plain, 0))
            assert_full(
                torch.logsumexp(ours, (0, 1), keepdim=True), torch.logsumexp(plain, (0, 1), keepdim=True)
            )
            weights = values(4, seed=1)
            weights[2] = 0
            for distributed, each in ((True, ours), (False, plain.requires_grad_())):
                upstream = distribute_tensor(weights, mesh) if distributed else weights
                torch.logsumexp(each, 0).backward(upstream)
            torch.testing.assert_close(ours.grad.full_tensor(), plain.grad, equal_nan=True)

            plain = values(size, 4, seed=2)
            ours = distribute_tensor(plain, mesh, placements)
            with CommDebugMode() as mode:
                counts = torch.histc(ours, 7)
            assert mode.get_comm_counts() == {gathers: 1}
            assert_full(counts, torch.histc(plain, 7))
            same = distribute_tensor(torch.ones(size, 4), mesh, placements)
            assert_full(torch.histc(same, 7), torch.histc(torch.ones(size, 4), 7))
            plain[0, 0] = torch.nan
            with pytest.raises(RuntimeError, match="not finite"):
                torch.histc(distribute_tensor(plain, mesh, placements), 7)


@on_ranks()
def test_views_leave_a_sharded_dim_of_size_one_where_it_is():
    mesh = init_device_mesh("cpu", (4,))
    for shape, dim, to in (
        ((1, 6), 0, (1, 2, 3)),
        ((1, 6), 0, (1, 6, 1)),
        ((2, 1, 6), 1, (2, 1, 2, 3)),
        ((1, 4, 2), 0, (1, 8)),
    ):
        x = distribute_tensor(values(*shape), mesh, [Shard(dim)])
        with CommDebugMode() as mode:
            view = x.view(to)
        assert mode.get_total_counts() == 0 and view.placements == (Shard(dim),)
        assert_full(view, values(*shape).view(to))


@on_ranks()
def test_plain_tensors_in_lists():
    mesh = init_device_mesh("cpu", (4,))
    distributed, plain = distribute_tensor(values(4, 4), mesh, [Shard(0)]), values(4, 4)
    with implicit_replication():
        torch._foreach_add_([distributed, plain], 1)
        products = torch._foreach_mul([distributed, plain], [plain, distributed])
    assert_full(distributed, values(4, 4) + 1)
    assert torch.equal(plain, values(4, 4) + 1)
    for product in products:
        assert_full(product, (values(4, 4) + 1) ** 2)
    with pytest.raises(ValueError, match="plain tensor of shape"):
        torch._foreach_add([distributed, plain], 1)


def test_another_torch_is_refused_at_import():
    program = "import torch; torch.__version__ = '9.9.0+cpu'; import tessera"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    ours = torch.__version__.partition("+")[0]
    assert done.returncode == 1
    assert f"ImportError: This tessera was built with torch {ours}, but torch 9.9.0+cpu" in done.stderr
