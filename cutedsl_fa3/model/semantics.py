"""What operations on tuples, layouts, views and atoms compute, one function for each.

What has none gives `UNKNOWN` in place of each number that its result's type leaves open, and the
model refuses the kernel if a barrier or an address ever hangs on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from . import lanes
from .integers import TABLE, default, filled, names
from .lanes import UNKNOWN, uniform
from .program import Node, NotCovered
from .shapes import Layout, fill, free, kept, leaves, offset, size
from .values import Atom, Pointer, View

__all__ = ["TABLE"]

WARPGROUP = 128
COPIED = "mov.b32 {$w0}, {$r0};"  # PTX that hides from the compiler what a value is


def _flat(args: list[Any]) -> list[Any]:
    return [leaf for value in args for leaf in leaves(value)]


@names("cute.make_int_tuple", "cute.make_coord", "cute.make_shape", "cute.make_stride")
def _made(node: Node, args: list[Any], warp: Any) -> Any:
    given = []
    for value, what in zip(args, node.arg_kinds, strict=True):
        if what.value is None:
            given.append(value)
        else:
            for leaf, template in zip(leaves(value), leaves(what.value), strict=True):
                if template is None:
                    given.append(leaf)
    return fill(node.out_kinds[0].value, given)


@names("cute.to_int_tuple", "cute.assume")
def _same(node: Node, args: list[Any], warp: Any) -> Any:
    return args[0]


@names("nvvm.inline_ptx")
def _ptx(node: Node, args: list[Any], warp: Any) -> Any:
    if not node.outs:
        raise NotCovered(f"PTX without a result is not followed: {node.attrs[:80]}")
    if f'ptxCode = "{COPIED}"' in node.attrs:
        return args[0]
    return UNKNOWN if len(node.outs) == 1 else [UNKNOWN] * len(node.outs)


@names("cute.get_scalars")
def _scalars(node: Node, args: list[Any], warp: Any) -> Any:
    dynamic = [
        leaf
        for leaf, template in zip(leaves(args[0]), leaves(node.arg_kinds[0].value), strict=True)
        if template is None
    ]
    return dynamic if len(node.outs) != 1 else dynamic[0]


@names("cute.get_leaves")
def _leaves(node: Node, args: list[Any], warp: Any) -> Any:
    found = leaves(args[0]) if args[0] is not UNKNOWN else [UNKNOWN] * len(node.outs)
    return found if len(node.outs) != 1 else found[0]


@names("cute.tuple_add", "cute.tuple_sub", "cute.tuple_mul", "cute.tuple_div", "cute.tuple_mod")
def _tuples(node: Node, args: list[Any], warp: Any) -> Any:
    function = {
        "cute.tuple_add": lambda a, b: a + b,
        "cute.tuple_sub": lambda a, b: a - b,
        "cute.tuple_mul": lambda a, b: a * b,
        "cute.tuple_div": lanes.truncated,
        "cute.tuple_mod": lanes.remainder,
    }[node.op]
    return _each(function, *args)


def _each(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return tuple(_each(function, x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, tuple):
        return tuple(_each(function, x, b) for x in a)
    if isinstance(b, tuple):
        return tuple(_each(function, a, x) for x in b)
    return UNKNOWN if a is UNKNOWN or b is UNKNOWN else function(a, b)


@names("cute.ceil_div")
def _ceil_div(node: Node, args: list[Any], warp: Any) -> Any:
    tile = node.arg_kinds[1].value if node.arg_kinds[1].known else args[1]
    if isinstance(tile, tuple) and isinstance(args[0], tuple):
        tile = (*tile, *[None] * (len(args[0]) - len(tile)))  # a mode without a tile stays
    return _each(lambda a, b: a if b is None else -lanes.floored(-a, b), args[0], tile)


@names("cute.tuple.product", "cute.size")
def _size(node: Node, args: list[Any], warp: Any) -> Any:
    value = args[0].layout if isinstance(args[0], View) else args[0]
    shape = value.shape if isinstance(value, Layout) else value
    for place in _numbers(node.attr("mode")):
        shape = shape[place] if isinstance(shape, tuple) else shape
    found = leaves(shape)
    return UNKNOWN if any(extent is UNKNOWN for extent in found) else size(shape)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"-?\d+", text.replace("i32", "").replace("i64", ""))]


@names("cute.crd2idx")
def _index(node: Node, args: list[Any], warp: Any) -> Any:
    if any(leaf is UNKNOWN for leaf in _flat([args[0], *args[1]])):
        return default(node.out_kinds[0])
    found = offset(args[0], args[1])
    return default(node.out_kinds[0]) if found is None else found


@names("cute.get_hier_coord")
def _hier_coord(node: Node, args: list[Any], warp: Any) -> Any:
    index, shape = args[0], args[1].shape
    if index is UNKNOWN:
        return default(node.out_kinds[0])
    found = []
    for extent in leaves(shape):
        found.append(index % extent if extent != 1 else 0)
        index = index // extent
    return fill(_hollow(shape), found)


def _hollow(shape: Any) -> Any:
    return tuple(_hollow(s) for s in shape) if isinstance(shape, tuple) else None


# Layouts and views.


@names("cute.make_layout", "cute.make_layout_like", "cute.make_identity_layout")
def _layout(node: Node, args: list[Any], warp: Any) -> Any:
    template = node.out_kinds[0].value
    if node.op != "cute.make_layout" or not args:
        return default(node.out_kinds[0])
    strides = args[1] if len(args) > 1 else filled(template.stride)
    return Layout(args[0], strides)


@names("cute.recast_layout")
def _recast_layout(node: Node, args: list[Any], warp: Any) -> Any:
    """Elements of another width would need other extents; those of one width keep theirs."""
    new, old = (re.search(rf"{age}_type_bits = (\d+)", node.attrs)[1] for age in ("new", "old"))
    return args[0] if new == old else default(node.out_kinds[0])


@names("cute.get_layout")
def _layout_of(node: Node, args: list[Any], warp: Any) -> Any:
    return args[0].layout


@names("cute.get_shape")
def _shape_of(node: Node, args: list[Any], warp: Any) -> Any:
    return args[0].shape if isinstance(args[0], Layout) else args[0].layout.shape


@names("cute.get_stride")
def _stride_of(node: Node, args: list[Any], warp: Any) -> Any:
    return args[0].stride


@names("cute.get_iter")
def _iterator(node: Node, args: list[Any], warp: Any) -> Any:
    return args[0].at if isinstance(args[0], View) else UNKNOWN


@names("cute.make_view")
def _view(node: Node, args: list[Any], warp: Any) -> Any:
    layout = args[1] if len(args) > 1 and isinstance(args[1], Layout) else None
    return View(args[0], layout or filled(node.out_kinds[0].value))


@names("cute.inttoptr")
def _pointed(node: Node, args: list[Any], warp: Any) -> Any:
    address = args[0]
    return (
        replace(address, bits=node.out_kinds[0].bits) if isinstance(address, Pointer) else UNKNOWN
    )


@names("cute.recast_iter")
def _recast(node: Node, args: list[Any], warp: Any) -> Any:
    what, pointer = node.out_kinds[0], args[0]
    if not isinstance(pointer, Pointer):
        return UNKNOWN
    return replace(pointer, bits=what.bits, swizzle=what.swizzle)


@names("cute.add_offset")
def _moved(node: Node, args: list[Any], warp: Any) -> Any:
    pointer, step = args
    if not isinstance(pointer, Pointer) or isinstance(step, tuple):
        return UNKNOWN
    return pointer.moved(step)


def _result_layout(node: Node, made: Layout | None) -> Layout:
    """What the type knows, completed by what was computed."""
    template = node.out_kinds[0].value
    if made is not None and not any(leaf is None for leaf in _flat(list(made))):
        same = _hollow(made.shape) == _hollow(template.shape)
        if same:
            return made
    return filled(template)


@names("cute.slice", "cute.dice")
def _sliced(node: Node, args: list[Any], warp: Any) -> Any:
    source, coord = args
    if not isinstance(source, View):
        return default(node.out_kinds[0])
    at = source.at
    if isinstance(at, Pointer):
        known = not any(leaf is UNKNOWN for leaf in (*leaves(coord), *leaves(source.layout.stride)))
        if known:
            at = at.moved(offset(coord, source.layout))
        elif at.space == "smem" and source.cover is None:
            at = replace(at, whole=at.whole or source)
        else:
            at = at.moved(UNKNOWN)
    layout = _result_layout(node, kept(coord, source.layout))
    return View(at, layout, source.cover)


@names("cute.group_modes", "cute.append_to_rank", "cute.select", "cute.coalesce")
def _grouped(node: Node, args: list[Any], warp: Any) -> Any:
    source = args[0]
    layout = source.layout if isinstance(source, View) else source
    if not isinstance(layout, Layout):
        return default(node.out_kinds[0])
    if node.op == "cute.group_modes":
        begin, end = (int(node.attr(n).split(":")[0]) for n in ("begin", "end"))
        made = Layout(_group(layout.shape, begin, end), _group(layout.stride, begin, end))
    elif node.op == "cute.select":
        chosen = _numbers(node.attr("mode"))
        made = Layout(*(tuple(part[i] for i in chosen) for part in layout))
    else:
        made = None
    layout = _result_layout(node, made)
    if isinstance(source, View):
        return View(source.at, layout, source.cover)
    return layout


@names(
    "cute.logical_divide",
    "cute.zipped_divide",
    "cute.tiled_divide",
    "cute.flat_divide",
    "cute.composition",
)
def _arranged(node: Node, args: list[Any], warp: Any) -> Any:
    """The same elements in another arrangement, which the type knows where it is static."""
    made = default(node.out_kinds[0])
    if isinstance(args[0], View) and isinstance(made, View):
        return View(args[0].at, made.layout, args[0].cover)
    return made


def _group(modes: Any, begin: int, end: int) -> tuple:
    return (*modes[:begin], tuple(modes[begin:end]), *modes[end:])


@names("cute.local_tile")
def _tiled(node: Node, args: list[Any], warp: Any) -> Any:
    source, coord = args[0], args[2]
    tile = node.arg_kinds[1].value
    coords = coord if isinstance(coord, tuple) else (coord,)
    tiles = tile if isinstance(tile, tuple) else (tile,)
    at = source.at
    if isinstance(at, Pointer):
        first = tuple(
            0 if free(c) or t is None else UNKNOWN if c is UNKNOWN else c * t
            for c, t in zip(coords, tiles, strict=False)
        )
        whole = any(leaf is UNKNOWN for leaf in _flat([first, *source.layout]))
        if whole and at.space == "smem" and source.cover is None:
            at = replace(at, whole=at.whole or source)
        else:
            at = at.moved(UNKNOWN if whole else offset(first, source.layout))
    template = node.out_kinds[0].value
    rests = [
        -lanes.floored(-size(sh), t) if t is not None and UNKNOWN not in leaves(sh) else UNKNOWN
        for c, t, sh in zip(coords, tiles, source.layout.shape, strict=False)
        if free(c)
    ]
    kept_modes = len(template.shape) - len(rests) if isinstance(template.shape, tuple) else 0
    shape = filled(template.shape)
    if isinstance(shape, tuple) and 0 < len(rests) <= len(shape):
        shape = (*shape[:kept_modes], *rests)
    return View(at, Layout(shape, filled(template.stride)))


@names("cute.tiled.copy.partition_D", "cute.tiled.copy.partition_S")
def _thread_part(node: Node, args: list[Any], warp: Any) -> Any:
    source = args[1]
    return _somewhere_in(source, node)


def _somewhere_in(source: View, node: Node) -> View:
    """A thread's part of a tensor, at a place that is not computed."""
    at = source.at
    if isinstance(at, Pointer):
        at = replace(at, whole=at.whole or source)
    return View(at, filled(node.out_kinds[0].value))


@names("cute.tiled.mma.partition")
def _warpgroup_part(node: Node, args: list[Any], warp: Any) -> Any:
    source, thread = args[1], args[2]
    operand = int(node.attr("operand_id").split(":")[0])
    template = node.out_kinds[0].value
    if not isinstance(source.at, Pointer) or source.at.space != "smem" or operand == 2:
        return _somewhere_in(source, node)
    text = node.arg_kinds[0].text
    shape = [int(n) for n in re.search(r"(\d+)x(\d+)x(\d+)", text).groups()]
    atoms = re.search(r'atom_layout_MNK = <"\((\d+),(\d+),(\d+)\)', text)
    extents = [int(n) for n in atoms.groups()] if atoms else [1, 1, 1]
    index = uniform(thread // WARPGROUP, warp.mask) if thread is not UNKNOWN else UNKNOWN
    if index is UNKNOWN or isinstance(index, np.ndarray):
        return _somewhere_in(source, node)
    place = index % extents[0] if operand == 0 else index // extents[0] % extents[1]
    rank = len(source.layout.shape)
    first = (place * shape[operand], *[0] * (rank - 1))
    return View(source.at.moved(offset(first, source.layout)), filled(template))


@names("cute.mma.make_fragment")
def _fragment(node: Node, args: list[Any], warp: Any) -> Any:
    source = args[1]
    if not isinstance(source, View) or not isinstance(source.at, Pointer):
        return default(node.out_kinds[0])
    cover = (Layout(source.layout.shape[0], source.layout.stride[0]), source.at.bits)
    at = replace(source.at, bits=128)
    return View(at, filled(node.out_kinds[0].value), cover)


@names("cute_nvgpu.atom.tma_partition")
def _tma_part(node: Node, args: list[Any], warp: Any) -> Any:
    coord, ctas, smem = args[1:4]
    made = [default(what) for what in node.out_kinds]
    at = smem.at
    parts = size(ctas.shape) if isinstance(ctas, Layout) else 1
    if isinstance(at, Pointer) and parts != 1:
        index = uniform(coord if not isinstance(coord, tuple) else leaves(coord)[0], warp.mask)
        box = leaves(node.out_kinds[0].value.shape)[0]  # of all parts; a copy moves one
        at = at.moved(UNKNOWN if index is UNKNOWN else index * (box // parts))
    made[0] = View(at, made[0].layout)
    return made


# Atoms.


@names(
    "cute.make_atom",
    "cute_nvgpu.atom.make_exec_tma",
    "cute.make_tiled_copy",
    "cute.make_tiled_mma",
)
def _atom(node: Node, args: list[Any], warp: Any) -> Any:
    fields = args[0].fields if args and isinstance(args[0], Atom) else ()
    return Atom(node.out_kinds[0].text, fields)


@names("cute_nvgpu.atom.set_value")
def _set(node: Node, args: list[Any], warp: Any) -> Any:
    atom = args[0] if isinstance(args[0], Atom) else Atom(node.out_kinds[0].text)
    name = re.search(r"field = #[\w.]+<([\w.]+)>", node.attrs)
    value = args[1] if len(args) > 1 else None
    return Atom(atom.text, (*atom.fields, (name[1] if name else "", value)))


@names(
    "cute_nvgpu.atom.make_non_exec_tiled_tma_load",
    "cute_nvgpu.atom.make_non_exec_tiled_tma_store",
    "cute_nvgpu.atom.make_non_exec_tiled_tma_reduce",
)
def _tma(node: Node, args: list[Any], warp: Any) -> Any:
    tensor = args[0]
    what = node.out_kinds[1]
    shape = tensor.layout.shape if isinstance(tensor, View) else filled(what.value.shape)
    strides = filled(what.value.stride)
    parts = _numbers(node.attr("num_multicast").split(":")[0]) or [1]
    atom = Atom(node.out_kinds[0].text, (("num_multicast", parts[0]),))
    return [atom, View(UNKNOWN, Layout(shape, strides))]
