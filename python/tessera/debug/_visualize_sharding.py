"""A picture of which rank has which elements."""

import torch

from tessera import _C

_Span = tuple[int, int]


def visualize_sharding(dtensor: torch.Tensor, header: str = "", use_rich: bool = False) -> None:
    """Prints which ranks have which rows and columns of a distributed tensor of one or two dims, on the first rank of its mesh.

    ``header``: a line above it. ``use_rich``: draw it with the package rich, if it is installed.
    """
    if dtensor.ndim > 2:
        raise RuntimeError(
            f"visualize_sharding draws tensors of one or two dims; this one has {dtensor.ndim}. Give it a slice, as x[0]."
        )
    if dtensor.numel() == 0 or dtensor.ndim == 0:
        return
    mesh = _C.device_mesh(dtensor)
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(coordinate):
        return
    cells: dict[tuple[_Span, _Span], list[int]] = {}
    for rank, offset, shape in _C.boxes(dtensor):
        spans = [(start, start + size - 1) for start, size in zip(offset, shape, strict=True)]
        cells.setdefault((spans[0], spans[1] if len(spans) == 2 else (0, 0)), []).append(rank)
    rows = sorted({each for each, _ in cells})
    columns = sorted({each for _, each in cells})
    table = [["", *(f"Col {first}-{last}" for first, last in columns)]]
    for row in rows:
        ranks = [cells.get((row, column), []) for column in columns]
        texts = [f"{mesh.device_type}:{','.join(map(str, each))}" if each else "" for each in ranks]
        table.append([f"Row {row[0]}-{row[1]}", *texts])
    if header:
        print(header)
    if not use_rich or not _print_rich(table):
        print(_text(table))


def _text(table: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _print_rich(table: list[list[str]]) -> bool:
    try:
        import rich.table
    except ImportError:
        return False
    drawn = rich.table.Table(*table[0], show_lines=True)
    for row in table[1:]:
        drawn.add_row(*row)
    rich.print(drawn)
    return True
