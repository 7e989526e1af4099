"""Single changes of a tensor that mend one broken rule: copy, pad, view, split, start elsewhere.

As in `retile`, a change gives the binding as it is afterwards, words, and Python for a torch tensor
called `x`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from cutedsl_fa3.layouts.swizzle import CHUNK

from .binding import Binding, round_up, settled
from .geometry import CUTLASS_NAMES, Geometry, dense_strides, element
from .retile import Change, Step, chunk, torch_code, with_tile

TORCH_NAMES = {name: ours for ours, name in CUTLASS_NAMES.items()}
FARTHEST = 2**40  # bytes of a stride; source: the same
COMPONENTS = {"complex64": "float32", "complex128": "float64"}  # two for each
COORDINATES = 2**31  # source: PTX ISA, cp.async.bulk.tensor takes signed 32-bit coordinates


# What the tensor's bits are called.


def mend_type(binding: Binding) -> list[Change]:
    """View the bits as a type that TMA knows, in as few elements as possible."""
    tensor = binding.tensor
    if binding.typed and is_known(tensor.dtype):
        return [of_tensors_type(binding)]
    if not isinstance(tensor.dtype, str) and not hasattr(tensor.dtype, "width"):
        named = element(str(tensor.dtype))  # a type of torch where one of cutlass is needed
        if isinstance(named, str):
            return []
        size = named.width // 8
        strides = (*tensor.strides[:-1], size) if tensor.strides else ()
        known = replace(tensor, dtype=named, itemsize=size, strides=strides)
        words = f"give the map the type cutlass.{named.__name__}"
        return [(Step("view", words), replace(binding, tensor=known, element=named))]
    if 0 < getattr(tensor.dtype, "width", 8) < 8 and tensor.kind != "Boolean":
        return [packed(binding)]
    return as_known(binding)


def as_known(binding: Binding) -> list[Change]:
    """The bits of a type that TMA does not know, as one that it does."""
    tensor = binding.tensor
    if tensor.kind in COMPONENTS:
        return viewed(binding, COMPONENTS[tensor.kind], tensor.itemsize // 2)
    size = math.gcd(tensor.itemsize, 8)
    return viewed(binding, {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}[size], size)


def is_known(dtype: object) -> bool:
    """Whether TMA takes a type as it is."""
    return getattr(dtype, "width", 0) in (8, 16, 32, 64)


def packed(binding: Binding) -> Change:
    """Values of less than a byte, as the bytes that hold them."""
    width, d = binding.tensor.dtype.width, binding.inner
    uint8 = element("uint8")

    def fewer(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-v * width // 8) if i == d else v for i, v in enumerate(values))

    tensor = replace(binding.tensor, dtype=uint8, itemsize=1, shape=fewer(binding.tensor.shape))
    after = replace(
        binding,
        tensor=tensor,
        element=uint8,
        given_box=None if binding.given_box is None else fewer(binding.given_box),
        tile=binding.tile and (binding.tile[0], -(-binding.tile[1] * width // 8)),
    )
    words = f"map the bytes that hold the {width}-bit elements, as Uint8"
    return Step("view", words), after


def viewed(binding: Binding, name: str, size: int) -> list[Change]:
    """The same bits as elements of another type of `size` bytes."""
    tensor, d = binding.tensor, binding.inner
    ratio = tensor.itemsize // size
    gaps = tensor.shape and tensor.shape[d] > 1 and tensor.strides[d] != tensor.itemsize
    if ratio > 1 and gaps:
        return mend_memory(
            binding
        )  # parts of an element can follow one another in a dense row only

    def wider(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(v * ratio if i == d else v for i, v in enumerate(values))

    dtype = element(name)
    strides = tuple(size if i == d else s for i, s in enumerate(tensor.strides))
    if tensor.shape and ratio == 1:
        strides = tensor.strides
    after = replace(
        binding,
        tensor=replace(
            tensor, dtype=dtype, itemsize=size, shape=wider(tensor.shape), strides=strides
        ),
        element=binding.element if binding.typed else dtype,
    )
    if binding.given_box is not None:
        after = replace(after, given_box=wider(binding.given_box))
    elif not binding.typed:
        after = replace(after, tile=(binding.tile[0], binding.tile[1] * ratio))
    words = f"view it as {name}, {ratio} for each element" if ratio > 1 else f"view it as {name}"
    code = f"x = x{last(binding, f'.view(torch.{name})')}"
    if tensor.kind in COMPONENTS:
        first, back = last(binding, "|").split("|")
        code = f"x = torch.view_as_real(x{first}).flatten(-2){back}"
    if ratio > 1 and not binding.typed:
        name_, value = ("box", after.given_box) if binding.tile is None else ("tile", after.tile)
        code += f"\n{name_} = {value}"
    return [(Step("view", words, torch_code(binding, code)), after)]


def last(binding: Binding, method: str) -> str:
    """A method that works on the last dimension, applied to the innermost one."""
    d = binding.inner
    if d >= len(binding.tensor.shape) - 1:
        return method
    return f".movedim({d}, -1){method}.movedim(-1, {d})"


def of_tensors_type(binding: Binding) -> Change:
    """The same tile of the tensor's own type."""
    after = replace(binding, element=binding.tensor.dtype)
    words = f"make the tile of {binding.tensor.kind}, as the tensor is"
    return with_tile(after, *binding.tile, words)


def mend_size(binding: Binding) -> list[Change]:
    """The tile's type is not the tensor's."""
    tensor, wanted = binding.tensor, binding.element
    name = TORCH_NAMES.get(getattr(wanted, "__name__", ""))
    if not binding.typed or name is None:
        return []
    if not is_known(tensor.dtype):
        return as_known(binding)
    changes = [of_tensors_type(binding)]
    dense = type(tensor).dense(tensor.shape, wanted, library=tensor.library)
    words = f"convert the tensor to {name}: {dense.bytes} bytes are written"
    code = torch_code(binding, f"x = x.to(torch.{name}).contiguous()")
    inner = max(len(tensor.shape) - 1, 0)
    changes.append(
        (
            Step("convert", words, code, copied=dense.bytes),
            replace(binding, tensor=dense, inner=inner),
        )
    )
    return changes


# Where the elements lie.


def mend_memory(binding: Binding) -> list[Change]:
    """Copy densely, copy with padded rows, start earlier, or map each index by itself.

    Only what ends with an address and strides that a map can hold; a split may need to be repeated.
    """
    found = [change for make in (shifted, copied, padded) for change in make(binding)]
    whole = [change for change in found if not _misplaced(change[1])]
    if not whole and not _far(binding):  # a tensor so large that its parts need maps of their own
        return [change for change in found if _far(change[1])]
    return whole + apart(binding, bool(whole))


def _misplaced(binding: Binding) -> bool:
    names = ("contiguous", "memory", "address", "stride")
    return any(not rule.ok and rule.name.startswith(names) for rule in binding.rules())


def _far(binding: Binding) -> list[int]:
    """The dimensions whose stride no map can hold, and that have a second index to go to."""
    pairs = enumerate(zip(binding.tensor.shape, binding.tensor.strides, strict=True))
    far = [d for d, (size, stride) in pairs if size > 1 and stride >= FARTHEST]
    return [d for d in far if d != binding.inner]  # of which a map says no stride


def _order(binding: Binding) -> list[int]:
    """The tensor's dimensions, the innermost one last."""
    dims = range(len(binding.tensor.shape))
    return [*(d for d in dims if d != binding.inner), binding.inner]


def _elements(tensor: Geometry, strides: tuple[int, ...]) -> str:
    """Strides as torch counts them."""
    return str(tuple(s // tensor.itemsize for s in strides))


def copied(binding: Binding) -> list[Change]:
    """A copy without gaps, the innermost dimension as it was."""
    tensor = binding.tensor
    strides = dense_strides(tensor.shape, tensor.itemsize, _order(binding))
    if binding.inner != len(tensor.shape) - 1:  # always a copy, whatever torch calls contiguous
        method = last(binding, ".clone(memory_format=torch.contiguous_format)")
    else:
        method = ".clone()" if tensor.is_dense else ".contiguous()"
    code = f"x = x{_resolved(tensor)}{method}"
    if tensor.library == "numpy":
        method = '.astype(x.dtype.newbyteorder("="), order="C")' if tensor.lazy else ".copy()"
        code = f"x = x{method}" if binding.inner == len(tensor.shape) - 1 else ""
    elif tensor.library != "torch":
        code = ""
    words = f"copy it without gaps: {tensor.bytes} bytes, strides of {_list(strides)} bytes"
    after = replace(tensor, strides=strides, address=None, before=0, lazy="")
    step = Step("copy", words, code, copied=tensor.bytes)
    return [(step, settled(replace(binding, tensor=after)))]


def padded(binding: Binding) -> list[Change]:
    """Strides that are the next multiples of 16 bytes: where the elements lie, and without gaps."""
    tensor, inner = binding.tensor, binding.inner
    dims = [d for d in range(len(tensor.shape)) if d != inner and tensor.shape[d] > 1]
    dense = dense_strides(tensor.shape, tensor.itemsize, _order(binding))
    starts = [dense]
    if _nested(tensor, inner, dims):
        starts.insert(0, tensor.strides)
    made = {}
    for start in starts:
        strides = _raised(binding, start, dims)
        # Elsewhere with the same strides helps a wrong address, and a copy without gaps does too.
        same = strides == tensor.strides and _raised(binding, dense, dims) == dense
        if dims and strides != dense and not same:
            made.setdefault(strides, _copied_into(binding, strides, dims, start is dense))
    return list(made.values())


def _raised(binding: Binding, start: tuple[int, ...], dims: list[int]) -> tuple[int, ...]:
    """The smallest legal strides from these on that keep elements apart, in the same order."""
    tensor, strides, unit = binding.tensor, list(start), _unit(binding)
    extent = tensor.shape[binding.inner] * tensor.itemsize
    for d in sorted(dims, key=lambda d: (start[d], -d)):
        strides[d] = round_up(max(strides[d], extent), unit)
        extent += (tensor.shape[d] - 1) * strides[d]
    given = replace(tensor, strides=tuple(strides))
    return settled(replace(binding, tensor=given)).tensor.strides


def _copied_into(
    binding: Binding, strides: tuple[int, ...], dims: list[int], compact: bool
) -> Change:
    """A copy into memory of these strides, or a tensor made with them in the first place."""
    tensor = binding.tensor
    row = min(strides[d] for d in dims)
    span = sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True)) + tensor.itemsize
    size = f"{row} bytes ({row // tensor.itemsize} elements)"
    if strides == tensor.strides:
        words = "copy it elsewhere as it lies"
    elif compact:
        words = f"pad the row to {size} and leave no other gap"
    else:
        words = f"pad the row to {size} instead of {min(tensor.strides[d] for d in dims)}"
    words += f": allocate it with strides of {_list(strides)} bytes, or copy it into such memory"
    place = f"x.new_empty_strided({tensor.shape}, {_elements(tensor, strides)})"
    after = replace(tensor, strides=strides, address=None, before=0, lazy="")
    step = Step(
        "pad a copy" if compact else "pad",
        words,
        torch_code(binding, f"x = {place}.copy_(x)"),
        copied=tensor.bytes,
        memory=span - tensor.bytes,
    )
    return step, settled(replace(binding, tensor=after))


def _nested(tensor: Geometry, inner: int, dims: list[int]) -> bool:
    """Whether no two elements share a byte, each dimension holding whole smaller ones."""
    extent = tensor.shape[inner] * tensor.itemsize
    if tensor.shape[inner] > 1 and tensor.strides[inner] != tensor.itemsize:
        return False
    for d in sorted(dims, key=lambda d: tensor.strides[d]):
        if not extent <= tensor.strides[d] < FARTHEST:
            return False
        extent += (tensor.shape[d] - 1) * tensor.strides[d]
    return True


def shifted(binding: Binding) -> list[Change]:
    """Start a few elements earlier, where the storage has them: nothing is copied."""
    tensor, d = binding.tensor, binding.inner
    early = (tensor.address or 0) % _unit(binding)
    more = early // tensor.itemsize
    if not early or early % tensor.itemsize or tensor.before < early or tensor.lazy:
        return []
    shape = tuple(n + more if i == d else n for i, n in enumerate(tensor.shape))
    words = (
        f"start {early} bytes ({more} elements) earlier in the same storage: nothing is copied, "
        f"and what was at 0 along dimension {d} is then at {more}"
    )
    where = f"{shape}, {_elements(tensor, tensor.strides)}, x.storage_offset() - {more}"
    moved = replace(
        tensor, shape=shape, address=tensor.address - early, before=tensor.before - early
    )
    code = torch_code(binding, f"x = x.as_strided({where})")
    return [(Step("start earlier", words, code), replace(binding, tensor=moved))]


def apart(binding: Binding, movable: bool) -> list[Change]:
    """One map for each index of a dimension whose stride no map can hold.

    Where a copy is possible, only of one of which a box holds a single index anyway.
    """
    far = _far(binding)
    if not far or (movable and binding.box[far[0]] > 1):
        return []
    return [pieces(binding, far[0], 1)]


def pieces(binding: Binding, dim: int, length: int) -> Change:
    """Several maps, each of `length` indices of a dimension."""
    tensor = binding.tensor
    count = -(-tensor.shape[dim] // length)
    shape = tuple(length if d == dim else n for d, n in enumerate(tensor.shape))
    one = part(replace(tensor, shape=shape), length * tensor.strides[dim], _unit(binding))
    words = f"use {count} maps, each of {length} along dimension {dim}"
    code = torch_code(binding, f"xs = x.split({length}, dim={dim})")
    after = settled(replace(binding, tensor=one, maps=binding.maps * count))
    return Step("split the tensor", words, code), after


def part(tensor: Geometry, step: int, unit: int = CHUNK) -> Geometry:
    """One of several parts that begin `step` bytes apart: the second, if only the first is aligned.

    What mends that one mends all, but for an earlier start, which would be another for each.
    """
    address = tensor.address
    if step % unit and (address or 0) % unit == 0:
        address = (address or 0) + step
    return replace(tensor, address=address, before=0)


def mend_coordinates(binding: Binding) -> list[Change]:
    """The fewest maps whose coordinates fit, each a whole number of boxes."""
    changes = []
    for d, size in enumerate(binding.tensor.shape):
        extent = max(binding.box[d], 1)
        if round_up(size, extent) - 1 >= COORDINATES or size > 2 * COORDINATES:
            unit = math.lcm(extent, chunk(binding)) if d == binding.inner else extent
            return [pieces(binding, d, COORDINATES // unit * unit)]
    return changes


def mend_address(binding: Binding) -> list[Change]:
    words = "give the address that the device sees, from 0 to 2^57 - 1"
    return [
        (Step("address", words), replace(binding, tensor=replace(binding.tensor, address=None)))
    ]


def _unit(binding: Binding) -> int:
    return 32 if binding.modes.get("interleave") == "32B" else 16


def _resolved(tensor: Geometry) -> str:
    names = {"conjugates": ".resolve_conj()", "negates": ".resolve_neg()"}
    return names.get(tensor.lazy, "")


def _list(values: object) -> str:
    return ", ".join(map(str, values))
