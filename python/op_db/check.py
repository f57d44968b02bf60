"""Runs cases on ranks that are threads, and reports what came of each."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cases
import torch
from cases import Inputs, Layout, Reference
from oracle import Tolerance, Wrong, compare, copy_of, first_line, full, is_of_peer, place, same_values
from torch.utils import _pytree as pytree

import tessera
from tessera import DTensor, Replicate

RANKS = 4

#: What can come of a check, the better first. excepted: refused, as exceptions.py says it may be.
KINDS = ("right", "excepted", "refused", "wrong", "crashed", "hung")


@dataclass
class Case:
    """One sample on one mesh in one layout, called in all the ways there are."""

    number: int
    mesh: tuple[int, ...]
    layout: Layout
    inputs: Inputs
    references: list[Reference]


@dataclass
class Outcome:
    case: int
    what: str  # "function", "in-place", "out", and each with " gradient"
    kind: str
    message: str = ""


class Ranks:
    """What the ranks of one run share: a board on which each writes what it found, and reads what the others did."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS)
        self._board: dict[int, Any] = {}

    def exchange(self, rank: int, value: Any) -> dict[int, Any]:
        """What each rank gave. All of them must call it."""
        self._board[rank] = value
        self._barrier.wait()
        board = dict(self._board)
        self._barrier.wait()
        return board

    def agree(self, rank: int, kind: str, message: str, random: list[Any] | None) -> tuple[str, str, bool]:
        """(kind, message, whether the ranks are in step with each other still). `random`: results to be the same on all of them."""
        board = self.exchange(rank, (kind, message, random))
        kinds = {found for found, _, _ in board.values()}
        if kinds == {"right"}:
            is_same = all(map(same_values, board[0][2] or [], random or []))
            return (
                self.agree(rank, "right" if is_same else "wrong", "random results differ between ranks", None)
                if random
                else ("right", "", True)
            )
        if kinds <= {"right", "wrong"}:
            first = next(r for r in range(RANKS) if board[r][0] == "wrong")
            return "wrong", board[first][1], True
        raised = {r: text for r, (found, text, _) in sorted(board.items()) if found == "refused"}
        if len(raised) == RANKS and not any(is_of_peer(text) for text in raised.values()):
            return "refused", raised[0], True
        own = {r: text for r, text in raised.items() if not is_of_peer(text)}
        if not own:
            return "hung", f"the ranks wait for each other: {next(iter(raised.values()))}", False
        return "wrong", f"on ranks {sorted(own)} alone: {next(iter(own.values()))}", False


class Rank:
    def __init__(
        self,
        tolerance: Tolerance,
        ranks: Ranks,
        gradients: bool,
        begin: Callable[[int], None],
        report: Callable[[Outcome], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._rank = tessera.get_rank()
        self._on_error = on_error
        self._tolerance = tolerance
        self._ranks = ranks
        self._gradients = gradients
        self._begin = begin
        self._report = report
        self._meshes = {mesh: tessera.init_device_mesh("cpu", mesh) for mesh in cases.MESHES}
        #: Random results, and gradients, of the first layout that a reference was tried with: all others must have the same.
        self._first: dict[tuple[int, str], list[Any]] = {}

    def run(self, todo: list[Case]) -> int:
        """How many of the cases were run: all, or up to the one in which the ranks fell out of step."""
        for count, case in enumerate(todo, 1):
            if self._rank == 0:
                self._begin(case.number)
            for reference in case.references:
                if not self._way(case, reference):
                    return count
        return len(todo)

    def _way(self, case: Case, reference: Reference) -> bool:
        state: dict[str, Any] = {}
        kind, in_step = self._step(case, reference.way, lambda: self._forward(case, reference, state), state)
        if not in_step or not (reference.grad_of and self._gradients):
            return in_step
        what = f"{reference.way} gradient"
        if "result" not in state:
            if self._rank == 0:
                self._report(Outcome(case.number, what, kind, "as forward"))
            return True
        return self._step(case, what, lambda: self._backward(case, reference, state), {})[1]

    def _step(
        self, case: Case, what: str, action: Callable[[], None], state: dict[str, Any]
    ) -> tuple[str, bool]:
        kind, message = "right", ""
        try:
            action()
        except Wrong as error:
            kind, message = "wrong", str(error)
        except Exception as error:
            self._on_error(error)
            kind, message = "refused", f"{type(error).__name__}: {first_line(error)}"
        kind, message, in_step = self._ranks.agree(self._rank, kind, message, state.get("random"))
        if self._rank == 0:
            self._report(Outcome(case.number, what, kind, message))
        return kind, in_step

    def _placed(self, case: Case, grad: bool) -> list[torch.Tensor]:
        mesh = self._meshes[case.mesh]
        return [
            place(tensor, mesh, placements, case.number * 100 + index).requires_grad_(grad and wanted)
            for index, (tensor, placements, wanted) in enumerate(
                zip(case.inputs.tensors, case.layout, case.inputs.requires_grad)
            )
        ]

    def _out(self, case: Case, reference: Reference) -> list[torch.Tensor]:
        if reference.way != "out":
            return []
        layouts = cases.layouts_of("out", case.number, reference.leaves, case.mesh, 1)
        layout = (
            layouts[cases.REPLICATED]
            if case.number % cases.LAYOUTS == cases.REPLICATED
            else list(layouts.values())[-1]
        )
        layout = tuple(
            tuple(Replicate() if p.is_partial() else p for p in placements) for placements in layout
        )
        return [
            place(torch.zeros_like(leaf), self._meshes[case.mesh], placements, 0)
            for leaf, placements in zip(reference.leaves, layout)
        ]

    def _forward(self, case: Case, reference: Reference, state: dict[str, Any]) -> None:
        tessera.manual_seed(0)
        tensors = self._placed(case, grad=reference.way != "out")
        before = [copy_of(tensor.to_local().detach()) for tensor in tensors]
        result = reference.call(tensors, self._out(case, reference))
        state.update(result=result, tensors=tensors)
        leaves, structure = pytree.tree_flatten(result)
        is_plain = [isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) for leaf in leaves]
        got = [full(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        # Of a sum the addends may change, as long as they add up to the same.
        partial = [
            index
            for index, placements in enumerate(case.layout)
            if any(placement.is_partial() for placement in placements)
        ]
        afterwards = {index: full(tensors[index]) for index in {*reference.written, *partial}}
        if len(leaves) != len(reference.leaves):
            raise Wrong(
                f"{len(leaves)} results ({structure}), not {len(reference.leaves)} ({reference.structure})"
            )
        if any(is_plain):
            raise Wrong(f"result {is_plain.index(True)} is a plain tensor")
        compares_values = reference.has_values and not reference.is_random
        for index, (leaf, expected) in enumerate(zip(got, reference.leaves)):
            compare(
                f"result {index}" if len(got) > 1 else "result",
                leaf,
                expected,
                self._tolerance,
                compares_values,
            )
        for index, expected in reference.written.items():
            compare(
                f"input {index} afterwards", afterwards[index], expected, self._tolerance, compares_values
            )
        if reference.is_random:
            state["random"] = got
        self._compare_with_first(
            reference,
            "result",
            [*got, *(afterwards[index] for index in sorted(reference.written))],
            self._tolerance,
        )
        for index, (tensor, local) in enumerate(zip(tensors, before)):
            now, then = (
                (afterwards[index], case.inputs.tensors[index])
                if index in afterwards
                else (tensor.to_local().detach(), local)
            )
            if index not in reference.written and not same_values(now, then):
                raise Wrong(f"input {index} was changed")

    def _compare_with_first(
        self, reference: Reference, what: str, found: list[Any], tolerance: Tolerance
    ) -> None:
        """Random numbers do not depend on the layout."""
        if not reference.is_random or not reference.has_values:
            return
        first = self._first.setdefault((id(reference), what), found)
        for index, (one, other) in enumerate(zip(found, first)):
            compare(f"random {what} {index}", one, other, tolerance, True)

    def _backward(self, case: Case, reference: Reference, state: dict[str, Any]) -> None:
        mesh = self._meshes[case.mesh]
        through = cases.differentiable_leaves(reference.process(state["result"]))
        if len(through) != len(reference.cotangents):
            raise Wrong(f"{len(through)} results have gradients, not {len(reference.cotangents)}")
        inputs = [state["tensors"][index] for index in reference.grad_of]
        cotangents = []
        for index, (leaf, cotangent) in enumerate(zip(through, reference.cotangents)):
            placements = leaf.placements if isinstance(leaf, DTensor) else ()  # type: ignore[attr-defined]
            if case.number % 2 == 0 or any(placement.is_partial() for placement in placements):
                placements = tuple(Replicate() for _ in case.mesh)
            shaped = cotangent if leaf.shape == cotangent.shape else torch.ones(leaf.shape, dtype=leaf.dtype)
            cotangents.append(place(shaped, mesh, placements, index) if isinstance(leaf, DTensor) else shaped)
        gradients = torch.autograd.grad(through, inputs, cotangents, allow_unused=True)
        got = [None if gradient is None else full(gradient) for gradient in gradients]
        for index, (gradient, expected) in enumerate(zip(got, reference.gradients)):
            name = f"gradient of input {reference.grad_of[index]}"
            if gradient is None and expected is not None and not expected.any():
                continue  # none is zero
            if expected is None and gradient is not None and not gradient.any():
                continue
            compare(
                name,
                gradient,
                expected,
                self._tolerance.wider(),
                reference.has_values and not reference.is_random,
            )
        self._compare_with_first(reference, "gradient", got, self._tolerance.wider())


def run_cases(
    todo: list[Case],
    tolerance: tuple[float, float],
    gradients: bool,
    timeout: float,
    begin: Callable[[int], None],
    report: Callable[[Outcome], None],
    on_error: Callable[[Exception], None] = lambda error: None,
) -> None:
    """Runs the cases, giving `begin` the index of each as it begins, `report` what came of each way of calling, and `on_error` what
    was raised on any rank."""
    while todo:
        ranks = Ranks()

        def main() -> int:
            return Rank(Tolerance(*tolerance), ranks, gradients, begin, report, on_error).run(todo)

        try:
            done = tessera.run(RANKS, main, timeout=timeout, threads_per_rank=1)[0]
        except (
            Exception
        ) as error:  # of the harness itself, or of what it uses: never to be taken for the operator's
            report(
                Outcome(todo[0].number, "harness", "wrong", f"{type(error).__name__}: {first_line(error)}")
            )
            return
        todo = todo[done:]
