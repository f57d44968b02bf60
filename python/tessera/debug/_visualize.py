"""Pictures of which rank holds which block of a tensor."""

import os
import sys
from collections.abc import Sequence

import torch

from tessera import _C


def visualize(
    tensor: torch.Tensor | str,
    to: Sequence[_C.Placement] | str | None = None,
    *,
    file: str | os.PathLike[str] | None = None,
    format: str | None = None,
) -> str:
    """A picture of which rank holds which block of a DTensor, of a ShardedTensor, or of a spec that is given as text
    ("[S(0), R] on mesh(dp=2, tp=4): f32[4096, 1024]"), in which case no ranks are needed.

    ``to``: draw how it is redistributed to these placements: before, after, the steps, and arrows. ``file``: write the picture there.
    ``format``: "text", "coloured", "svg", or "html", a page that needs no other file and says more of what the mouse is on; by
    default what the name of the file ends with, else text, in colours on a terminal. Communicates nothing.
    """
    if format is None:
        ending = os.fspath(file).rpartition(".")[2] if file is not None else ""
        colours = file is None and sys.stdout.isatty()
        format = ending if ending in ("svg", "html") else "coloured" if colours else "text"
    if isinstance(tensor, str):
        wanted = "" if to is None else to if isinstance(to, str) else f"[{', '.join(map(str, to))}]"
        picture = _C.picture_of_text(tensor, wanted, format)
    else:
        if isinstance(to, str):
            raise TypeError(
                "visualize: of a tensor, `to` is a list of placements, as [Shard(0), Replicate()]."
            )
        picture = _C.picture(tensor, to, format)
    if file is not None:
        with open(file, "w", encoding="utf-8") as opened:
            opened.write(picture)
    return picture
