"""Changes of the number of dimensions: a tensor map has 1 to 5, an interleaved one 3 to 5."""

from __future__ import annotations

from dataclasses import replace

from cutedsl_fa3.layouts.swizzle import CHUNK

from .binding import Binding, round_up
from .geometry import Geometry
from .relayout import copied, part
from .retile import Change, Step, torch_code, with_box

RANK = 5  # dimensions of a tensor map; source: cuTensorMapEncodeTiled


def mend_rank(binding: Binding) -> list[Change]:
    """Drop a dimension of size 1, merge two without copying, copy and merge, or map one by one."""
    if binding.tensor.shape == ():
        return [_grown(binding)]
    if len(binding.tensor.shape) <= RANK:  # an interleaved map, which needs three
        after = replace(binding, modes={**binding.modes, "interleave": "none"})
        return [(Step("mode", "use interleave none", "interleave = 'none'"), after)]
    dims = range(len(binding.tensor.shape))
    tensor, free = binding.tensor, [d for d in dims if _is_free(binding, d)]
    single = [_without(binding, d, "squeeze") for d in free if tensor.shape[d] == 1]
    if single:
        return single[:1]
    pairs = [d for d in free if d + 1 in dims and _is_whole(binding, d + 1)]
    merged = [
        _merged(binding, d)
        for d in pairs
        if tensor.strides[d] == tensor.shape[d + 1] * tensor.strides[d + 1]
    ]
    if merged:
        return merged[:1]
    if not free:
        outer = [d for d in dims if d not in (binding.inner, binding.rows)]
        d = min(outer, key=binding.box.__getitem__)
        words = f"use {binding.box[d]} boxes of 1 along dimension {d} instead of one"
        return [with_box(binding, {d: 1}, max(binding.box[d], 1), words, "split the box")]
    changes = copied(binding) if pairs and not tensor.is_dense else []
    return changes + [_without(binding, d, "unbind") for d in free[:1]]


def _is_free(binding: Binding, dim: int) -> bool:
    """Whether one index of a dimension is loaded at a time."""
    return dim not in (binding.inner, binding.rows) and binding.box[dim] == 1


def _is_whole(binding: Binding, dim: int) -> bool:
    """Whether boxes along a dimension do not cross its end, so that an outer one can join it."""
    return dim != binding.rows and binding.tensor.shape[dim] % max(binding.box[dim], 1) == 0


def _grown(binding: Binding) -> Change:
    size = binding.tensor.itemsize
    if binding.tile is None:
        tensor = replace(binding.tensor, shape=(1,), strides=(size,))
        steps = None if binding.steps is None else (1,)
        box = (max(1, CHUNK // size),)
        after = replace(binding, tensor=tensor, given_box=box, steps=steps)
    else:
        tensor = replace(binding.tensor, shape=(1, 1), strides=(CHUNK, size))
        steps = None if binding.steps is None else (1, 1)
        after = replace(binding, tensor=tensor, inner=1, rows=0, steps=steps)
    code = f"x = x.reshape({', '.join(map(str, tensor.shape))}){_said(after)}"
    words = f"view it as a tensor of shape {tensor.shape}"
    return Step("view", words, torch_code(binding, code)), after


def mend_dimensions(binding: Binding) -> list[Change]:
    """A tile on a vector: one row of a matrix."""
    tensor = binding.tensor
    if tensor.shape == ():
        return [_grown(binding)]
    row = round_up(tensor.shape[0] * tensor.itemsize, CHUNK)
    matrix = replace(tensor, shape=(1, *tensor.shape), strides=(row, *tensor.strides))
    steps = None if binding.steps is None else (1, *binding.steps)
    after = replace(binding, tensor=matrix, inner=1, rows=0, steps=steps)
    code = torch_code(binding, f"x = x[None]{_said(after)}")
    return [(Step("view", "view it as a matrix of one row", code), after)]


def _dropped(binding: Binding, dim: int, tensor: Geometry, box: list[int]) -> Binding:
    """The binding on a tensor that lacks a dimension which the binding's had."""

    def less(d: int | None) -> int | None:
        return d if d is None or d < dim else d - 1

    steps = binding.steps and tuple(s for d, s in enumerate(binding.steps) if d != dim)
    given = None if binding.given_box is None else tuple(box)
    return replace(
        binding,
        tensor=tensor,
        inner=less(binding.inner),
        rows=less(binding.rows),
        given_box=given,
        steps=steps,
    )


def _without(binding: Binding, dim: int, how: str) -> Change:
    """Without a dimension: dropped where its size is 1, else one map for each of its indices."""
    tensor, count = binding.tensor, binding.tensor.shape[dim]
    others = [d for d in range(len(tensor.shape)) if d != dim]
    fewer = replace(
        tensor,
        shape=tuple(tensor.shape[d] for d in others),
        strides=tuple(tensor.strides[d] for d in others),
    )
    after = _dropped(binding, dim, fewer, [binding.box[d] for d in others])
    if how == "unbind":
        fewer = part(fewer, tensor.strides[dim])
        after = replace(after, tensor=fewer)
    if how == "squeeze":
        words, code = f"drop dimension {dim}, whose size is 1", f"x = x.squeeze({dim})"
    else:
        words = f"use {count} maps, one for each index of dimension {dim}"
        code = f"xs = x.unbind({dim})"
    code = torch_code(binding, code + _said(after))
    return Step(how, words, code), replace(after, maps=binding.maps * count)


def _merged(binding: Binding, dim: int) -> Change:
    """Two dimensions that follow one another in memory as one."""
    tensor, nxt = binding.tensor, dim + 1
    shape = (*tensor.shape[:dim], tensor.shape[dim] * tensor.shape[nxt], *tensor.shape[nxt + 1 :])
    strides = (*tensor.strides[:dim], *tensor.strides[nxt:])
    box = [e for d, e in enumerate(binding.box) if d != dim]
    after = _dropped(binding, dim, replace(tensor, shape=shape, strides=strides), box)
    words = f"merge dimensions {dim} and {nxt}, which follow one another: shape {shape}"
    code = torch_code(binding, f"x = x.flatten({dim}, {nxt}){_said(after)}")
    return Step("merge", words, code), after


def _said(after: Binding) -> str:
    """The arguments that name dimensions, of which there are now others."""
    box = f"\nbox = {after.given_box}" if after.given_box is not None else f"\nrows = {after.rows}"
    return box + (f"\nelement_strides = {after.steps}" if after.steps is not None else "")
