"""What is one for the process, where ranks are threads of it: the table of docs/threads.md, row by row."""

import functools
import importlib
import io
import logging
import signal
import sys
import threading
import time
import warnings

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.backends.mha
import torch.nn.functional as F
import torch.utils.deterministic
from ranks import assert_full, on_ranks, values
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

import tessera
from tessera import DTensor, Partial, Replicate, Shard


def distributed(tensor, placement, size=4):
    return tessera.distribute_tensor(
        tensor, tessera.init_device_mesh("cpu", (size,)), [placement], src_data_rank=None
    )


def partial_leaf(full, size):
    """Of which each rank holds another summand."""
    mesh = tessera.init_device_mesh("cpu", (size,))
    mine = full * (1 if tessera.get_rank() == 0 else 0) + (1 - 2 * (tessera.get_rank() % 2)) * values(
        *full.shape, seed=9
    )
    return DTensor.from_local(mine, mesh, [Partial()]).detach().requires_grad_()


def after_a_while(rank):
    """On that rank, so that the others are ahead of it."""
    if tessera.get_rank() == rank:
        time.sleep(0.02)


# --- autocast ------------------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_autocast_of_a_partial_leaf_does_not_wait_with_its_cache_locked():
    weight, input = values(4, 4), values(2, 4, seed=1)
    for slow in (0, 1, 0, 1):
        w, x = partial_leaf(weight, 2), distributed(input, Replicate(), 2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first = x @ w
            after_a_while(slow)  # the other clears the cache when it leaves
            second = x @ w
            expected = input.bfloat16() @ w.full_tensor().bfloat16()
        assert_full(first, expected, rtol=0.02, atol=0.02)
        assert_full(second, expected, rtol=0.02, atol=0.02)
        (first.float().sum() + second.float().sum()).backward()
        assert w.grad is not None


def test_autocast_with_a_cache_refuses_what_would_hang():
    def main():
        w, x = partial_leaf(values(4, 4), 2), distributed(values(2, 4), Replicate(), 2)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True):
            x @ distributed(values(4, 4), Shard(0), 2).requires_grad_()  # needs no other rank
            assert w.to(torch.float64).dtype == torch.float64  # not autocast's
            x @ w

    with pytest.raises(RuntimeError, match="cache_enabled=True"):
        tessera.run(2, main)


# --- Locks of Python -------------------------------------------------------------------------------------------------------------------


class Computes:
    def __init__(self, x):
        self.x = x
        self.calls = 0

    @functools.cached_property
    def total(self):
        self.calls += 1
        return self.x.sum().full_tensor()


@on_ranks(4)
def test_a_cached_property_may_communicate():
    computes = Computes(distributed(values(8), Shard(0)))
    torch.testing.assert_close(computes.total, values(8).sum())
    assert computes.total is computes.total
    assert computes.calls == 1
    assert isinstance(Computes.total, functools.cached_property)


@on_ranks(2)
def test_linear_cross_entropy_in_chunks():
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    input, weight, target = values(16, 4), values(12, 4, seed=1), torch.arange(16) % 12
    options = LinearCrossEntropyOptions(chunking_method="aspect_ratio:2")
    x, w = (
        distributed(input, Shard(0), 2).requires_grad_(),
        distributed(weight, Replicate(), 2).requires_grad_(),
    )
    loss = F.linear_cross_entropy(x, w, distributed(target, Shard(0), 2), options=options)
    one_x, one_w = input.requires_grad_(), weight.requires_grad_()
    one = F.linear_cross_entropy(one_x, one_w, target, options=options)
    assert_full(loss, one)
    loss.backward()
    one.backward()
    assert_full(x.grad, one_x.grad)
    assert_full(w.grad, one_w.grad)


def test_modules_are_imported_by_ranks_but_do_not_communicate(tmp_path, monkeypatch):
    (tmp_path / "imported_quietly.py").write_text("import time\ntime.sleep(0.1)\nvalue = 3\n")
    (tmp_path / "imported_loudly.py").write_text(
        "import tessera, torch\n"
        "mesh = tessera.init_device_mesh('cpu', (2,))\n"
        "value = tessera.DTensor.from_local(torch.ones(2), mesh, [tessera.Partial()]).full_tensor()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert tessera.run(4, lambda: importlib.import_module("imported_quietly").value) == [3] * 4
    with pytest.raises(RuntimeError, match="communicates while it imports imported_loudly"):
        tessera.run(2, lambda: importlib.import_module("imported_loudly").value)


# --- Forward-mode AD -------------------------------------------------------------------------------------------------------------------


def layer(x, w):
    return torch.tanh(torch.mm(x, w)).sum(1)


def tangent(function, primals, tangents):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(*map(forward_ad.make_dual, primals, tangents))).tangent


FORWARD = {
    "jvp": lambda function, primals, tangents: torch.func.jvp(function, primals, tangents)[1],
    "dual_level": tangent,
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_ad_on_ranks(name):
    x, w, dx, dw = values(3, 5), values(5, 6, seed=1), values(3, 5, seed=2), values(5, 6, seed=3)
    expected = FORWARD[name](layer, (x, w), (dx, dw))

    def main():
        primals = (distributed(x, Shard(1)), distributed(w, Shard(0)))
        tangents = (distributed(dx, Shard(1)), distributed(dw, Shard(0)))
        for slow in (tessera.get_rank(), 0, 3, -1):
            after_a_while(slow)
            assert_full(FORWARD[name](layer, primals, tangents), expected)
            assert forward_ad.unpack_dual(primals[0]).tangent is None

    for _ in range(5):
        tessera.run(4, main, timeout=60)
    assert torch.equal(FORWARD[name](layer, (x, w), (dx, dw)), expected)


def test_nested_forward_mode_ad_on_ranks():
    def second_derivative(x):
        one = torch.ones_like(x)
        return torch.func.jvp(lambda y: torch.func.jvp(torch.sin, (y,), (one,))[1], (x,), (one,))[1]

    def main():
        x = values(5, seed=tessera.get_rank())
        for slow in range(4):
            after_a_while(slow)
            torch.testing.assert_close(second_derivative(x), -torch.sin(x))
            torch.testing.assert_close(torch.func.jacfwd(torch.sin)(x), torch.diag(torch.cos(x)))

    tessera.run(4, main, timeout=60)


def test_forward_mode_ad_on_some_ranks_and_with_errors():
    def main():
        mesh = tessera.init_device_mesh("cpu", (4,))
        if tessera.get_rank() % 2 == 0:
            with pytest.raises(ValueError, match="mine"), forward_ad.dual_level():
                raise ValueError("mine")
            x = torch.ones(2) * (tessera.get_rank() + 1)
            assert torch.equal(tangent(torch.square, (x,), (x,)), 2 * x * x)
            with (
                pytest.raises(RuntimeError, match="inside already"),
                forward_ad.dual_level(),
                forward_ad.dual_level(),
            ):
                pass
            return mesh.size()
        with pytest.raises(RuntimeError, match="no level"):
            forward_ad.make_dual(torch.ones(2), torch.ones(2))

    tessera.run(4, main, timeout=60)

    def failing():
        with forward_ad.dual_level():
            if tessera.get_rank() == 1:
                raise KeyError("lost")
            distributed(values(4), Shard(0), 2).sum().item()

    with pytest.raises(KeyError, match="lost"):
        tessera.run(2, failing, timeout=60)


# --- Settings --------------------------------------------------------------------------------------------------------------------------

SETTINGS = {
    "default dtype": (torch.set_default_dtype, torch.get_default_dtype, torch.float64, torch.float32),
    "deterministic algorithms": (
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled,
        True,
        False,
    ),
    "matmul precision": (
        torch.set_float32_matmul_precision,
        torch.get_float32_matmul_precision,
        "medium",
        "highest",
    ),
    "flash attention": (
        torch.backends.cuda.enable_flash_sdp,
        torch.backends.cuda.flash_sdp_enabled,
        False,
        True,
    ),
    "mkldnn": (lambda value: torch._C._set_mkldnn_enabled(value), torch._C._get_mkldnn_enabled, False, True),
    "cudnn": (
        lambda value: setattr(torch.backends.cudnn, "deterministic", value),
        torch._C._get_cudnn_deterministic,
        True,
        False,
    ),
    "fill of new memory": (
        lambda value: setattr(torch.utils.deterministic, "fill_uninitialized_memory", value),
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
        False,
        True,
    ),
    "nnpack": (lambda value: torch._C._set_nnpack_enabled(value), torch._C._get_nnpack_enabled, False, True),
    "precision of mkldnn": (
        lambda value: setattr(torch.backends.mkldnn.conv, "fp32_precision", value),
        lambda: torch.backends.mkldnn.conv.fp32_precision,
        "ieee",
        torch.backends.mkldnn.conv.fp32_precision,
    ),
    "fast path of attention": (
        lambda value: torch.backends.mha.set_fastpath_enabled(value),
        lambda: torch.backends.mha.get_fastpath_enabled(),
        False,
        True,
    ),
    "order of einsum": (
        lambda value: torch.backends.opt_einsum.m._set_enabled(value),
        lambda: torch.backends.opt_einsum.m._get_enabled(),
        False,
        torch.backends.opt_einsum.m._get_enabled(),
    ),
}
if not torch.backends.opt_einsum.is_available():  # then it cannot be set
    del SETTINGS["order of einsum"]


@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_change_settings_together(name, monkeypatch):
    # PyTorch's own test tools, which other tests import, forbid to set some of them.
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True)
    change, get, new, old = SETTINGS[name]

    def main():
        for slow in range(4):
            after_a_while(slow)
            assert get() == old
            change(new)
            assert get() == new
            after_a_while((slow + 1) % 4)
            assert get() == new
            change(old)
            assert get() == old

    try:
        tessera.run(4, main, timeout=60)
        with pytest.raises(RuntimeError, match="one for the process"):
            tessera.run(
                2,
                lambda: (
                    change(new if tessera.get_rank() else old)
                    or distributed(values(4), Shard(0), 2).sum().item()
                ),
            )
        change(old)
        with pytest.raises(RuntimeError, match="runs of ranks as threads"):
            tessera.run(2, lambda: tessera.run(2, lambda: change(new)))
        assert tessera.run(1, lambda: change(new) or get()) == [new]  # there is nobody else
    finally:
        change(old)
    assert get() == old


def test_settings_that_differ_are_an_error_that_shows_both():
    def main():
        torch.set_default_dtype(torch.float64 if tessera.get_rank() else torch.bfloat16)

    with pytest.raises(
        RuntimeError,
        match=r"torch.set_default_dtype\(torch.(float64|bfloat16)\), but rank [01] calls torch.set_default_dtype",
    ):
        tessera.run(2, main)
    assert torch.get_default_dtype() == torch.float32


@on_ranks(4)
def test_attention_with_a_chosen_kernel():
    q, k, v = (values(2, 4, 6, 8, seed=seed) for seed in range(3))
    expected = F.scaled_dot_product_attention(q, k, v)
    for slow in range(4):
        with sdpa_kernel(SDPBackend.MATH):
            result = F.scaled_dot_product_attention(*(distributed(each, Shard(2)) for each in (q, k, v)))
            after_a_while(slow)
        assert_full(result, expected)
        assert_full(
            F.scaled_dot_product_attention(*(distributed(each, Shard(1)) for each in (q, k, v))), expected
        )


@pytest.mark.parametrize(
    "scope, variable",
    [
        (
            lambda value: torch.utils.checkpoint.set_checkpoint_early_stop(value),
            "_enable_checkpoint_early_stop",
        ),
        (
            lambda value: torch.utils.checkpoint.set_checkpoint_debug_enabled(value),
            "_checkpoint_debug_enabled",
        ),
    ],
)
def test_ranks_set_how_to_checkpoint_together(scope, variable):
    def main():
        for slow in range(4):
            after_a_while(slow)
            assert getattr(torch.utils.checkpoint, variable) is None
            with scope(False):
                after_a_while((slow + 1) % 4)
                assert getattr(torch.utils.checkpoint, variable) is False
            assert getattr(torch.utils.checkpoint, variable) is None

    tessera.run(4, main, timeout=60)

    def failing():
        with scope(False):
            if tessera.get_rank() == 1:
                raise KeyError("lost")
            distributed(values(4), Shard(0), 2).sum().item()

    with pytest.raises(KeyError, match="lost"):
        tessera.run(2, failing, timeout=60)
    assert getattr(torch.utils.checkpoint, variable) is None


def test_anomaly_mode_of_a_rank_ends_with_it():
    seen = []

    def main():
        tessera.run(2, lambda: torch.set_anomaly_enabled(True))
        return torch.is_anomaly_enabled()

    def outer():
        if tessera.get_rank() == 0:
            other = threading.Thread(target=lambda: seen.append(main()))
            other.start()
            other.join()

    tessera.run(2, outer)
    assert seen == [False]


def test_anomaly_mode_is_on_while_a_rank_has_it_on():
    def main():
        assert not torch.is_anomaly_enabled()
        if tessera.get_rank() == 3:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly():
                after_a_while(tessera.get_rank())
                assert torch.is_anomaly_enabled()
                after_a_while(1)
                x = torch.zeros(1, requires_grad=True)
                with pytest.raises(RuntimeError, match="nan"):
                    (torch.sqrt(x) * 0).sum().backward()
        assert not torch.is_anomaly_enabled()

    for _ in range(5):
        tessera.run(4, main, timeout=60)
    assert not torch.is_anomaly_enabled()
    tessera.run(2, lambda: torch.set_anomaly_enabled(tessera.get_rank() == 0))
    assert not torch.is_anomaly_enabled()


# --- What each thread has for itself -------------------------------------------------------------------------------------------------------

kept = []  # what ends when nobody holds it
OWN = {
    "grad mode": (lambda: torch._C._set_grad_enabled(False), torch.is_grad_enabled),
    "inference mode": (lambda: kept.append(torch._C._InferenceMode(True)), torch.is_inference_mode_enabled),
    "forward-mode AD enabled": (lambda: torch._C._set_fwd_grad_enabled(False), torch._C._is_fwd_grad_enabled),
    "autocast": (lambda: torch.set_autocast_enabled("cpu", True), lambda: torch.is_autocast_enabled("cpu")),
    "autocast dtype": (
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        lambda: torch.get_autocast_dtype("cpu"),
    ),
    "autocast cache": (lambda: torch.set_autocast_cache_enabled(True), torch.is_autocast_cache_enabled),
    "saved tensor hooks": (
        lambda: torch.autograd.graph.save_on_cpu().__enter__(),
        lambda: torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
    ),
    "functorch": (
        lambda: torch._C._functorch._grad_increment_nesting(),
        torch._C._functorch.maybe_current_level,
    ),
    "default device": (lambda: torch.set_default_device("meta"), lambda: torch.get_default_device().type),
    "denormal numbers": (
        lambda: torch.set_flush_denormal(True),
        lambda: (torch.tensor([1e-310], dtype=torch.float64) * 1).item(),
    ),
    "view replay": (
        lambda: torch._C._set_view_replay_enabled(not torch._C._is_view_replay_enabled()),
        torch._C._is_view_replay_enabled,
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_each_rank_has_its_own(name):
    change, get = OWN[name]
    barrier = threading.Barrier(2)

    def main():
        before = get()
        barrier.wait()
        if tessera.get_rank() == 0:
            change()
        barrier.wait()
        return before, get()

    (before, changed), (other_before, other) = tessera.run(2, main)
    assert before == other_before == other != changed


# --- The rest ----------------------------------------------------------------------------------------------------------------------------


def test_the_default_generator_is_shared_and_not_used_by_distributed_tensors():
    torch.manual_seed(3)
    expected = torch.rand(400)
    torch.manual_seed(3)
    drawn = tessera.run(4, lambda: [torch.rand(1).item() for _ in range(100)])
    assert sorted(x for part in drawn for x in part) == sorted(
        expected.tolist()
    )  # none twice, none lost; who gets which is chance
    before = torch.random.default_generator.get_state()

    def main():
        tessera.manual_seed(5)
        mesh = tessera.init_device_mesh("cpu", (4,))
        return tessera.randn(8, device_mesh=mesh, placements=[Shard(0)]).full_tensor(), torch.rand(
            2, generator=tessera.random.generator()
        )

    first, second = tessera.run(4, main), tessera.run(4, main)
    assert torch.equal(torch.random.default_generator.get_state(), before)
    for (full, own), (full_again, own_again) in zip(first, second):
        assert torch.equal(full, first[0][0]) and torch.equal(full, full_again)
        assert torch.equal(own, own_again)


def test_plain_numbers_cannot_be_drawn_again():
    def main(function):
        x = torch.ones(64, requires_grad=True)
        checkpoint(function, x, use_reentrant=False).sum().backward()

    with pytest.raises(
        RuntimeError, match="Rank [01] computed a forward again.*bernoulli_.*start ranks as processes"
    ):
        tessera.run(2, lambda: main(torch.nn.functional.dropout), timeout=60)
    main(torch.nn.functional.dropout)  # without ranks
    generator = torch.Generator()

    def with_generator(x):
        return x * torch.rand(64, generator=generator.manual_seed(1))

    tessera.run(2, lambda: main(with_generator), timeout=60)
    before = torch.random.default_generator.get_state()

    @on_ranks(2)
    def distributed_numbers():
        x = distributed(torch.ones(64), Shard(0), 2).requires_grad_()
        y = checkpoint(torch.nn.functional.dropout, x, use_reentrant=False)
        y.sum().backward()
        assert_full(x.grad, y.detach().full_tensor())

    distributed_numbers()
    assert torch.equal(torch.random.default_generator.get_state(), before)


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_each_rank_has_its_own_cache_of_parametrizations():
    barrier = threading.Barrier(2)

    def main():
        layer = torch.nn.Linear(2, 2, bias=False)
        parametrize.register_parametrization(layer, "weight", Doubled())
        with parametrize.cached():
            assert layer.weight is layer.weight
            barrier.wait()
            if tessera.get_rank() == 1:
                barrier.wait()  # inside while the other one leaves and enters again
                return
        assert layer.weight is not layer.weight
        with torch.no_grad():
            layer.parametrizations.weight.original.fill_(3)
        with parametrize.cached():
            assert torch.equal(layer.weight, torch.full((2, 2), 6.0))
        barrier.wait()

    tessera.run(2, main)
    assert parametrize._cache_enabled == 0


def test_each_rank_may_change_saved_tensors():
    barrier = threading.Barrier(2)

    def main():
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            barrier.wait()
            a = torch.full((3,), float(tessera.get_rank()), requires_grad=True)
            b = a.clone()
            out = (b**2).sum()
            b.sin_()
            if tessera.get_rank() == 1:
                barrier.wait()  # the other one has left
            out.backward()
            with (
                pytest.raises(RuntimeError, match="nested"),
                torch.autograd.graph.allow_mutation_on_saved_tensors(),
            ):
                pass
        if tessera.get_rank() == 0:
            barrier.wait()
        return a.grad.tolist()

    assert tessera.run(2, main) == [[0.0] * 3, [2.0] * 3]
    assert not torch.autograd.graph._allow_mutation_on_saved_tensors_enabled


def test_hooks_of_all_modules_end_with_the_rank_that_adds_them():
    calls = []

    def main():
        torch.nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1))
        torch.nn.Identity()(1)

    tessera.run(2, main)
    assert len(calls) == 2
    # Threads of later ranks get the same ids.
    for _ in range(5):
        tessera.run(2, lambda: torch.nn.Identity()(1))
    assert len(calls) == 2
    assert not torch.nn.modules.module._global_forward_hooks


def test_hooks_of_all_modules_are_of_the_rank_that_adds_them():
    register, calls = torch.nn.modules.module.register_module_forward_hook, []
    before = register(lambda *_: calls.append("before"))
    barrier = threading.Barrier(2)

    def main():
        rank = tessera.get_rank()
        if rank == 0:
            handle = register(lambda *_: calls.append("rank 0"))
        barrier.wait()
        if rank == 1:
            torch.nn.Identity()(1)
            assert calls == ["before"]
        barrier.wait()
        if rank == 0:
            torch.nn.Identity()(1)
            assert calls == ["before", "before", "rank 0"]
            handle.remove()
            before.remove()
            torch.nn.Identity()(1)
            assert len(calls) == 3

    tessera.run(2, main)
    after = register(lambda *_: calls.append("after"))
    torch.nn.Identity()(1)
    after.remove()
    torch.nn.Identity()(1)
    assert calls[3:] == ["after"]
    steps = []
    handle = register_optimizer_step_post_hook(lambda *_: steps.append(1))
    tessera.run(2, lambda: torch.optim.SGD([torch.ones(1, requires_grad=True)]).step())
    handle.remove()
    assert steps == [1, 1]


def test_logging_a_loss_does_not_wait_with_the_handler_locked():
    log = logging.getLogger("test_logging_a_loss")
    log.setLevel(logging.INFO)
    log.propagate = False
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    log.addHandler(handler)

    @on_ranks(4)
    def main():
        loss = distributed(torch.ones(8), Shard(0), 4).sum()
        log.info("loss %.1f", loss)
        log.info("loss %(loss).2f", {"loss": loss})

    try:
        main()
    finally:
        log.removeHandler(handler)
    assert sorted(stream.getvalue().split()) == ["8.0"] * 4 + ["8.00"] * 4 + ["loss"] * 8


def test_warning_filters_are_as_before_when_all_ranks_have_left():
    filters, content = warnings.filters, list(warnings.filters)
    barrier = threading.Barrier(2)

    def main():
        if tessera.get_rank() == 1:
            barrier.wait()
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("error" if tessera.get_rank() else "ignore")
            if tessera.get_rank() == 0:
                barrier.wait()
            barrier.wait()
        barrier.wait()

    tessera.run(2, main)
    assert warnings.filters is filters and list(warnings.filters) == content


def test_ranks_compile_at_the_same_time():
    @functools.partial(torch.compile, backend="aot_eager")
    def step(x):
        return torch.sin(x).sum()

    def main():
        x = torch.full((3 + tessera.get_rank() % 2,), 0.5, requires_grad=True)
        step(x).backward()
        return torch.allclose(x.grad, torch.cos(x))

    assert tessera.run(4, main, timeout=120) == [True] * 4


def test_the_profiler_is_for_one_rank():
    barrier = threading.Barrier(2)

    def main():
        if tessera.get_rank() == 1:
            barrier.wait()
            with pytest.raises(RuntimeError, match="while rank 0 is profiled"), torch.profiler.profile():
                pass
            barrier.wait()
            return None
        with torch.profiler.profile() as profile:
            barrier.wait()
            torch.ones(4).sum()
            barrier.wait()
        return "aten::sum" in {event.key for event in profile.key_averages()}

    assert tessera.run(2, main)[0]


def test_intra_op_threads_are_put_back():
    before = torch.get_num_threads()
    tessera.run(2, lambda: torch.set_num_threads(3))
    assert torch.get_num_threads() == before


def test_signal_handlers_are_the_main_threads():
    with pytest.raises(ValueError, match="main thread"):
        tessera.run(2, lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL))


def test_nothing_is_replaced_when_no_ranks_run():
    from torch._functorch import eager_transforms

    owners = [
        (torch._C, "_set_default_dtype"),
        (torch, "set_anomaly_enabled"),
        (forward_ad, "enter_dual_level"),
        (eager_transforms, "jvp_increment_nesting"),
        (warnings.catch_warnings, "__enter__"),
        (functools.cached_property, "__get__"),
    ]
    before = [getattr(*each) for each in owners]
    during = tessera.run(2, lambda: [getattr(*each) for each in owners])[0]
    assert [getattr(*each) for each in owners] == before
    assert [a is not b for a, b in zip(before, during)] == [True] * 5 + [sys.version_info < (3, 12)]
