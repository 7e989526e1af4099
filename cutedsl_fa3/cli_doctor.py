"""`doctor`: explain a tensor map from the command line, without the tensor and without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from . import cli_bench

EXAMPLE = "e.g. --shape 2,4096,16,64 --dtype bf16 --tile 128x64"


def run_doctor(
    shape: Annotated[
        str, typer.Option(help="Sizes by comma, as torch prints them; empty for no dimension.")
    ],
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32, e4m3, int32, ... or torch's name.")],
    strides: Annotated[
        str | None,
        typer.Option(help="In elements, by comma; in bytes as in 1022B,2B. Default: no gaps."),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="data_ptr(), as in 0x7f0000000010. Default: aligned.")
    ] = None,
    tile: Annotated[str | None, typer.Option(help="Rows x columns, as in 128x64.")] = None,
    rows: Annotated[
        int | None,
        typer.Option(help="Dimension of the tile's rows. Default: 1, of a matrix 0."),
    ] = None,
    tile_dtype: Annotated[str | None, typer.Option(help="Of the tile, if not dtype.")] = None,
    box: Annotated[
        str | None, typer.Option(help="Instead of a tile: extents by comma, in shape's order.")
    ] = None,
    swizzle: Annotated[
        str | None,
        typer.Option(help="none, 32B, 64B or 128B. Default: the tile's own, of a box none."),
    ] = None,
    element_strides: Annotated[
        str | None, typer.Option(help="By comma, in shape's order. Default: 1.")
    ] = None,
    interleave: Annotated[str | None, typer.Option(help="none, 16B or 32B.")] = None,
    oob_fill: Annotated[str | None, typer.Option(help="zeros or nan.")] = None,
    l2_promotion: Annotated[str | None, typer.Option(help="none, 64B, 128B or 256B.")] = None,
    cache_hint: Annotated[str | None, typer.Option(help="evict_normal, evict_first, ...")] = None,
    prefetch: Annotated[str | None, typer.Option(help="none, descriptor or tile.")] = None,
    name: Annotated[str, typer.Option(help="What the tensor is called in the answer.")] = "x",
) -> None:
    """Say whether TMA can copy a tile of a tensor, by every rule, and the smallest change if not.

    Prints the tensor map in words, each rule with its value, what the compiler would encode
    instead without an error, changes as Python, and bytes and sectors of an instruction. Exits
    with 1 if the map is illegal, with 2 if the options say no tensor.
    """
    cli_bench.need_compiler()
    from .layouts import LayoutError, explain

    modes = {
        "interleave": interleave,
        "oob_fill": oob_fill,
        "l2_promotion": l2_promotion,
        "cache_hint": cache_hint,
        "prefetch": prefetch,
    }
    try:
        tensor = _tensor(shape, strides, dtype, address)
        diagnosis = explain(
            tensor,
            None if tile is None else _tile(tile, tile_dtype),
            box=None if box is None else _numbers("--box", box),
            swizzle=swizzle,
            rows=rows,
            element_strides=(
                None if element_strides is None else _numbers("--element-strides", element_strides)
            ),
            name=name,
            **{field: value for field, value in modes.items() if value is not None},
        )
    except LayoutError as error:
        typer.echo(f"refused: {error}", err=True)
        raise typer.Exit(2) from None
    print(diagnosis)
    if not diagnosis.legal:
        raise typer.Exit(1)


def _tensor(shape: str, strides: str | None, dtype: str, address: str | None) -> Any:
    """The geometry that the options describe."""
    from .layouts import Geometry, LayoutError

    sizes = _numbers("--shape", shape)
    where = None if address is None else _parsed("--address", address, lambda text: int(text, 0))
    try:
        dense = Geometry.dense(sizes, dtype, address=where, library="torch")
    except LayoutError:
        raise LayoutError(
            f"--dtype {dtype}: no element type; give one as in bf16, fp16, fp32, fp64, e4m3, e5m2, "
            "int8 to int64, uint8 to uint64, bool, complex64, complex128"
        ) from None
    if strides is None:
        return dense
    given = tuple(
        _parsed("--strides", part, lambda text: _bytes(text, dense.itemsize))
        for part in _parts(strides)
    )
    if len(given) != len(sizes):
        raise LayoutError(
            f"--strides {strides}: {len(given)} entries, but --shape {shape} has {len(sizes)}: one "
            "each is needed"
        )
    return Geometry(sizes, given, dense.dtype, where, dense.itemsize, "torch")


def _bytes(text: str, itemsize: int) -> int:
    """A stride in bytes: of elements, or as it is with a B."""
    return int(text[:-1]) if text.endswith(("B", "b")) else int(text) * itemsize


def _tile(text: str, dtype: str | None) -> tuple:
    """(rows, cols), and the type where it is not the tensor's."""
    from .layouts import LayoutError

    parts = tuple(_parsed("--tile", part, int) for part in text.lower().split("x"))
    if len(parts) != 2:
        raise LayoutError(f"--tile {text}: rows x columns are needed, as in 128x64")
    return parts if dtype is None else (*parts, _type(dtype))


def _type(name: str) -> type:
    from .layouts import LayoutError
    from .layouts.doctor.geometry import element

    found = element(name)
    if isinstance(found, str):
        raise LayoutError(f"--tile-dtype {name}: no element type of TMA; give one as in bf16, fp32")
    return found


def _numbers(option: str, text: str) -> tuple[int, ...]:
    return tuple(_parsed(option, part, int) for part in _parts(text))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.strip("()[] ").split(",") if part.strip()]


def _parsed(option: str, text: str, number: Callable[[str], int]) -> int:
    from .layouts import LayoutError

    try:
        return number(text.strip())
    except ValueError:
        raise LayoutError(f"{option}: {text!r} is no whole number; {EXAMPLE}") from None
