"""tessera.run: ranks as threads of this process."""

import os
import signal
import threading
import time

import pytest
import torch
from ranks import on_ranks, values

import tessera
from tessera import Shard


def test_results_come_in_the_order_of_ranks():
    assert tessera.run(4, lambda: (tessera.get_rank(), tessera.get_world_size())) == [
        (rank, 4) for rank in range(4)
    ]


def test_arguments_are_passed_on():
    assert tessera.run(2, lambda a, b: a + b + tessera.get_rank(), 10, 20) == [30, 31]


def test_an_exception_reaches_the_caller_and_frees_the_others():
    def main():
        mesh = tessera.init_device_mesh("cpu", (4,))
        if tessera.get_rank() == 2:
            raise KeyError("lost")
        tessera.distribute_tensor(values(8), mesh, [Shard(0)])

    started = time.monotonic()
    with pytest.raises(KeyError, match="lost") as caught:
        tessera.run(4, main)
    assert time.monotonic() - started < 60
    assert "rank 2 of 4" in str(getattr(caught.value, "__notes__", "rank 2 of 4"))


def test_the_others_are_told_who_failed():
    messages = {}

    def main():
        mesh = tessera.init_device_mesh("cpu", (2,))
        if tessera.get_rank() == 1:
            raise ValueError("no such file")
        try:
            tessera.distribute_tensor(values(8), mesh, [Shard(0)])
        except RuntimeError as error:
            messages[0] = str(error)
            raise

    with pytest.raises(ValueError, match="no such file"):
        tessera.run(2, main)
    assert "rank 1" in messages[0] and "no such file" in messages[0]


def test_a_rank_that_ends_early_is_no_hang():
    def main():
        mesh = tessera.init_device_mesh("cpu", (2,))
        if tessera.get_rank() == 0:
            tessera.distribute_tensor(values(8), mesh, [Shard(0)])

    with pytest.raises(RuntimeError, match="rank 1"):
        tessera.run(2, main)


def test_collectives_that_do_not_fit_are_an_error():
    def main():
        mesh = tessera.init_device_mesh("cpu", (2,))
        x = tessera.distribute_tensor(values(8), mesh, [Shard(0)], src_data_rank=None)
        return x.full_tensor() if tessera.get_rank() else x.sum().item()

    with pytest.raises(RuntimeError, match="do not fit together"):
        tessera.run(2, main)


@on_ranks(4)
def test_the_lock_is_released_in_every_call_that_waits():
    mesh = tessera.init_device_mesh("cpu", (4,))
    full = values(10, 6)
    x = tessera.distribute_tensor(full, mesh, [Shard(0)])
    # Each of these waits for all ranks, and would never return if one kept Python's lock meanwhile.
    assert torch.equal(x[3].full_tensor(), full[3])
    assert torch.equal(x[2:7].full_tensor(), full[2:7])
    assert torch.equal(x[torch.tensor(4)].full_tensor(), full[4])
    assert x.sum().item() == pytest.approx(full.sum().item(), abs=1e-4)
    assert bool(x.isfinite().all())
    assert x.tolist() == full.tolist()
    assert torch.equal(x, x.clone())
    for row, expected in zip(x, full):
        assert torch.equal(row.full_tensor(), expected)
    assert torch.equal(x.T.contiguous().full_tensor(), full.T)


@pytest.mark.parametrize("size", [0, -1])
def test_a_world_needs_ranks(size):
    with pytest.raises(ValueError, match="at least one rank"):
        tessera.run(size, lambda: None)


def test_without_ranks_there_is_an_error_that_says_what_to_do():
    with pytest.raises(RuntimeError, match="tessera.run"):
        tessera.init_device_mesh("cpu", (1,))


def test_the_modes_of_the_caller_hold_on_the_ranks():
    with torch.no_grad():
        assert tessera.run(2, torch.is_grad_enabled) == [False, False]
    with torch.inference_mode():
        assert tessera.run(2, torch.is_inference_mode_enabled) == [True, True]
    assert tessera.run(2, torch.is_grad_enabled) == [True, True]


def test_a_signal_interrupts_ranks_that_wait():
    def main():
        mesh = tessera.init_device_mesh("cpu", (2,))
        if tessera.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        while time.monotonic() < deadline:
            tessera.distribute_tensor(values(8), mesh, [Shard(0)])

    deadline = time.monotonic() + 60
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs have it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            tessera.run(2, main)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() < deadline


def test_ranks_in_ranks():
    def inner():
        return tessera.get_world_size()

    assert tessera.run(2, lambda: tessera.run(3, inner)) == [[3, 3, 3]] * 2


def test_runs_at_the_same_time_do_not_meet():
    def main(value):
        mesh = tessera.init_device_mesh("cpu", (2,))
        x = tessera.DTensor.from_local(torch.full((2,), value), mesh, [tessera.Partial()])
        return x.full_tensor()[0].item()

    results = {}
    threads = [
        threading.Thread(target=lambda v=value: results.update({v: tessera.run(2, main, v)}))
        for value in (1.0, 5.0)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1.0: [2.0, 2.0], 5.0: [10.0, 10.0]}
