"""From a kernel object to machine code that can be inspected, kept on disk and launched.

A kernel is compiled for `kernel.arch` whatever GPU is present, or none. The result holds bytes
only: a cubin (for inspection) and a host object file (to launch). A fresh compile and an entry of
the disk cache are launched through the same path, `load_module`, so they cannot behave differently.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from .versions import require_dsl

# cute.compile keeps its state in one object per process: two threads in it at once fail.
DSL_LOCK = threading.RLock()

_CAPABILITY = {"sm_90a": (9, 0), "sm_100a": (10, 0)}


class CompileError(RuntimeError):
    """The compiler ran, but its output is not what a kernel of this package must give."""


class DeviceError(RuntimeError):
    """No GPU of this process can run the kernel."""


class Kernel(Protocol):
    """What `compile_kernel` needs to know of a kernel."""

    name: str
    arch: str

    @property
    def host(self) -> Callable[..., Any]:
        """The bound @cute.jit method that launches the kernel."""
        ...

    @property
    def key_text(self) -> str:
        """Whatever affects the code, printed."""
        ...

    def fake_args(self) -> tuple[Any, ...]:
        """Stand-ins for the arguments of `host`, the stream last."""
        ...


@dataclass(frozen=True)
class Resources:
    """What ptxas and the launch ask for; of several kernels in one host function, the most.

    Units: `stack`, `spill_stores`, `spill_loads` in bytes per thread, `smem_dynamic` in bytes per
    CTA. `registers` is per thread at launch: with setmaxnreg it does not show a role's budget, and
    only spills tell whether the budget was enough. `advisories` are ptxas' Cxxxx lines.
    """

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    smem_dynamic: int
    advisories: tuple[str, ...] = ()

    @property
    def spills(self) -> int:
        return self.spill_stores + self.spill_loads

    def __str__(self) -> str:
        spills = f"spills {self.spill_stores} B stored, {self.spill_loads} B loaded"
        return (
            f"{self.registers} registers, stack {self.stack} B, {spills}, "
            f"dynamic SMEM {self.smem_dynamic} B, {len(self.advisories)} advisories"
        )


@dataclass(frozen=True)
class Compiled:
    """A kernel as bytes: `cubin` to look at, `object_code` to launch.

    `name` is the exported host symbol and the prefix of every kernel symbol in the cubin, so that
    kernels loaded from disk side by side in one process cannot be taken for each other.
    """

    name: str
    arch: str
    symbols: tuple[str, ...]
    cubin: bytes = field(repr=False)
    object_code: bytes = field(repr=False)
    resources: Resources
    seconds: float = field(default=0.0, compare=False)

    @cached_property
    def function(self) -> Any:
        """The tvm-ffi host function, loaded without asking for a device."""
        return _load(self.name, self.object_code)

    @cached_property
    def launch(self) -> Any:
        """The function to call with tensors; the stream is the caller's current one.

        Arguments are positional; a dataclass argument is passed as a tuple of its fields.
        Raises: DeviceError before any launch where no visible GPU has this architecture.
        """
        require_device(self.arch)
        return self.function


def compile_kernel(kernel: Kernel, *, name: str | None = None) -> Compiled:
    """Compile `kernel` for `kernel.arch`; no GPU is needed or touched.

    A kernel that has a `check` is checked first: the compiler accepts what cannot be launched.

    Raises: CompileError; VersionError; what `check` raises; whatever the DSL raises for an error in
        the kernel itself.
    """
    require_dsl()
    getattr(kernel, "check", lambda: None)()
    if kernel.arch not in _CAPABILITY:
        raise CompileError(f"{kernel.name}: arch {kernel.arch!r}; valid: {', '.join(_CAPABILITY)}")
    if name is None:
        name = f"{kernel.name}_{hashlib.sha256(kernel.key_text.encode()).hexdigest()[:16]}"
    name = _identifier(name)
    start = time.perf_counter()
    with DSL_LOCK, _named(kernel, name), tempfile.TemporaryDirectory(prefix="cutedsl_fa3_") as tmp:
        result = _compile(kernel, Path(tmp))
        symbols = tuple(result.kernel_info)
        stray = [symbol for symbol in symbols if not symbol.startswith(name)]
        if stray or not symbols:
            raise CompileError(
                f"{kernel.name}: kernel symbols {stray or 'none'} do not carry the name {name}; "
                f"every @cute.kernel that `host` launches must be a method of the kernel's class"
            )
        object_path = Path(tmp) / "kernel.o"
        result.export_to_c(str(object_path), function_name=name)
        return Compiled(
            name=name,
            arch=kernel.arch,
            symbols=symbols,
            cubin=result.__cubin__,
            object_code=object_path.read_bytes(),
            resources=_resources(
                (Path(tmp) / "remarks.yaml").read_text(), str(result.ir_module), kernel.name
            ),
            seconds=time.perf_counter() - start,
        )


def program(kernel: Kernel) -> bytes:
    """What the kernel's methods trace to, before any pass: equal in every process.

    Raises: VersionError; what `check` raises; whatever the DSL raises for an error in the kernel.
    """
    require_dsl()
    getattr(kernel, "check", lambda: None)()
    import cutlass.cute as cute

    options = f"--gpu-arch {kernel.arch} --enable-tvm-ffi"
    with DSL_LOCK:
        traced = cute.compile.to_precompiled_mlir(kernel.host, *kernel.fake_args(), options=options)
        return bytes(traced.get_bitcode())


def _compile(kernel: Kernel, folder: Path) -> Any:
    """Run the DSL, with the cubin and ptxas' remarks in `folder`.

    The folder must be fresh: dumped files are named by a truncated symbol, so that two compiles
    sharing a folder overwrite each other. `no_jit_engine` because the launch goes through the
    exported object in every case; an engine exists only if `arch` is that of the GPU present.
    """
    import cutlass.cute as cute
    from cutlass.base_dsl import compiler as options

    compiler = cute.compile[
        options.GPUArch(kernel.arch),
        options.EnableTVMFFI(True),
        options.KeepCUBIN(True),
        options.DumpDir(str(folder)),
        # What remarks{ptx} asks for, without its source lines: those take a quarter of the time.
        options.PtxasOptions("-v"),
        options.ExtraCompilerOpts("diagnostic=ptx"),
        options.RemarkOutput(str(folder / "remarks.yaml")),
    ]
    result = compiler(kernel.host, *kernel.fake_args(), no_jit_engine=True)
    if result is None or result.__cubin__ is None:
        raise CompileError(f"{kernel.name}: the DSL gave no cubin (is CUTE_DSL_DRYRUN set?)")
    return result


@contextlib.contextmanager
def _named(kernel: Kernel, name: str) -> Iterator[None]:
    """Give every staged method of the kernel's class the symbol prefix `name` meanwhile.

    The DSL's own mangled name is dropped: it carries the word "cutlass", which makes ptxas at -O3
    allocate differently (and spill) on SM100.
    """
    staged = {}
    for attribute in dir(type(kernel)):
        setter = getattr(getattr(type(kernel), attribute, None), "set_name_prefix", None)
        if callable(setter):
            staged[attribute] = setter
    for setter in staged.values():
        setter(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    try:
        yield
    finally:
        for setter in staged.values():
            setter("")


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name, flags=re.ASCII).replace("cutlass", "dsl")


_PROPERTIES = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
_REGISTERS = re.compile(r"Used (\d+) registers")
_ADVISORY = re.compile(r"\((C\d{4,5})\)\s*(.*?)\s*$", re.MULTILINE)


def _resources(remarks: str, host_ir: str, kernel_name: str) -> Resources:
    """Read ptxas' report (one YAML remark, its lines verbatim) and the launch's SMEM request."""
    text = remarks.replace("\\n", "\n").replace("''", "'")
    properties = [tuple(map(int, found)) for found in _PROPERTIES.findall(text)]
    registers = [int(found) for found in _REGISTERS.findall(text)]
    if not properties or not registers:
        raise CompileError(f"{kernel_name}: no resource usage in ptxas' report:\n{remarks}")
    advisories = dict.fromkeys(f"{code} {what}" for code, what in _ADVISORY.findall(text))
    return Resources(
        registers=max(registers),
        stack=max(stack for stack, _, _ in properties),
        spill_stores=max(stores for _, stores, _ in properties),
        spill_loads=max(loads for _, _, loads in properties),
        smem_dynamic=_dynamic_smem(host_ir, kernel_name),
        advisories=tuple(advisories),
    )


# cudaLaunchConfig_t: grid, block, dynamic SMEM, stream, attributes, their number.
_LAUNCH_SMEM = re.compile(
    r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : [^\n]*"
    r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>\n"
    r"\s*llvm\.store (%\w+), \1 : i64"
)


def _dynamic_smem(host_ir: str, kernel_name: str) -> int:
    """The dynamic SMEM bytes that the host code puts into its launch configurations."""
    sizes = []
    for function in host_ir.split("llvm.func @"):
        for launch in _LAUNCH_SMEM.finditer(function):
            value = re.escape(launch.group(2))
            constant = re.search(value + r" = llvm\.mlir\.constant\((\d+) : i64\)", function)
            if constant is None:
                raise CompileError(f"{kernel_name}: dynamic SMEM is not a compile-time constant")
            sizes.append(int(constant.group(1)))
    if not sizes:
        raise CompileError(f"{kernel_name}: no launch configuration in the host code")
    return max(sizes)


def _load(name: str, object_code: bytes) -> Any:
    """Link the object file into this process and look its function up."""
    require_dsl()
    runtime = importlib.import_module("cutlass.cute").runtime
    with DSL_LOCK, tempfile.TemporaryDirectory(prefix="cutedsl_fa3_") as tmp:
        path = Path(tmp) / "kernel.o"
        path.write_bytes(object_code)
        return getattr(runtime.load_module(str(path), enable_tvm_ffi=True), name)


def device_capabilities() -> tuple[tuple[int, int], ...]:
    """Compute capability of each visible GPU; empty without a driver or a GPU."""
    from cuda.bindings import driver

    try:
        if driver.cuInit(0)[0] != 0:
            return ()
        count = driver.cuDeviceGetCount()[1]
    except RuntimeError:  # the driver library cannot be found
        return ()
    attribute = driver.CUdevice_attribute
    parts = (
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    )
    return tuple(
        (driver.cuDeviceGetAttribute(parts[0], i)[1], driver.cuDeviceGetAttribute(parts[1], i)[1])
        for i in range(count)
    )


def require_device(arch: str) -> None:
    """Check that a visible GPU runs code for `arch`.

    Raises: DeviceError.
    """
    major, minor = _CAPABILITY[arch]
    visible = device_capabilities()
    if not visible:
        raise DeviceError(
            f"no CUDA device: a kernel for {arch} was compiled, but launching it needs a GPU of "
            f"compute capability {major}.{minor} and its driver"
        )
    if (major, minor) not in visible:
        given = ", ".join(f"{a}.{b}" for a, b in visible)
        raise DeviceError(
            f"a kernel for {arch} runs on compute capability {major}.{minor} only; visible GPUs "
            f"have {given}"
        )
