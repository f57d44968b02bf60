"""Why operators on distributed tensors are carried out as they are."""

import contextlib

from tessera import _C


class Explain(contextlib.AbstractContextManager["Explain"]):
    """Inside, writes down how this rank carries out operators on distributed tensors, and what it redistributes: the strategies that were
    valid and the price of each, the one chosen and why, the steps of every redistribution with bytes and time, and what would avoid it.

        with Explain() as explanation:
            model(x)
        print(explanation)
    """

    def __init__(self) -> None:
        self._scope = _C.ExplainScope()
        self._text = ""

    def __enter__(self) -> "Explain":
        self._scope.enter()
        return self

    def __exit__(self, *exception: object) -> None:
        self._text = self._scope.exit()

    def __str__(self) -> str:
        return self._text


def explain(call: str, mesh: str = "") -> str:
    """Explains one call of an operator that is given as text, without any rank.

        explain("mm(f32[4096,4096] [S(0),R], f32[4096,4096] [R,S(1)])", mesh="dp=8,tp=8")

    Tensors are ``dtype[sizes] [placements]``, replicated without placements; other values are written as in Python. The mesh may also
    stand at the end of the call, as ``on mesh(dp=8, tp=8)``. Text that cannot be read is a ValueError that points at the character.
    """
    return _C.explain(call, mesh)
