"""A kernel is compiled once: for all threads, for later processes, and again when it is damaged."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cutlass.cute as cute
import pytest
from small_kernel import Scale, TileGemm

from cutedsl_fa3 import cache
from cutedsl_fa3.compile import Compiled

ROOT = Path(__file__).resolve().parent.parent
FILES = ("kernel.o", "kernel.cubin", "meta.json")


class Counter:
    """Counts compiles, and can hold them back."""

    def __init__(self, compile_kernel, delay: float = 0.0):
        self.compile_kernel = compile_kernel
        self.delay = delay
        self.names: list[str] = []

    def __call__(self, kernel, *, name: str) -> Compiled:
        self.names.append(name)
        time.sleep(self.delay)
        return self.compile_kernel(kernel, name=name)


@pytest.fixture(scope="module")
def shelf() -> dict[str, Compiled]:
    """Kernels compiled by this module's tests, by name: a test of the cache needs no fresh one."""
    return {}


@pytest.fixture
def compiles(tmp_path, monkeypatch, shelf) -> Counter:
    """An empty cache in memory and on disk, and the compiles that it asks for."""
    from cutedsl_fa3.compile import compile_kernel

    def shelved(kernel, *, name: str) -> Compiled:
        if name not in shelf:
            shelf[name] = compile_kernel(kernel, name=name)
        return shelf[name]

    counter = Counter(shelved)
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "compile_kernel", counter)
    monkeypatch.setattr(cache, "sources", lambda: {"file.py": "1"})  # edited meanwhile or not
    for name in ("_memory", "_origins", "_known"):
        monkeypatch.setattr(cache, name, {})
    monkeypatch.setattr(cache, "_warned", False)
    return counter


def forget() -> None:
    """What a new process starts with: an empty memory."""
    cache._memory.clear()
    cache._known.clear()


def entry_of(kernel) -> Path:
    return cache.root() / cache.key(kernel)


@pytest.mark.compile
def test_second_request_is_served_from_memory(compiles):
    first = cache.get(Scale(2.0))
    assert cache.get(Scale(2.0)) is first
    assert len(compiles.names) == 1


@pytest.mark.compile
def test_memory_hit_takes_less_than_two_microseconds(compiles):
    kernel = Scale(2.0)
    cache.get(kernel)
    rounds = 2000
    fastest = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(rounds):
            cache.get(kernel)
        fastest = min(fastest, (time.perf_counter() - start) / rounds)
    assert fastest < 2e-6


@pytest.mark.compile
def test_eight_threads_asking_for_one_kernel_compile_it_once(compiles):
    compiles.delay = 0.1
    together = threading.Barrier(8)

    def ask(_: int) -> Compiled:
        together.wait()
        return cache.get(Scale(2.0))

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(ask, range(8)))
    assert len(compiles.names) == 1
    assert all(each is results[0] for each in results)


@pytest.mark.compile
def test_entry_on_disk_equals_the_compiled_kernel(compiles):
    compiled = cache.get(TileGemm())
    forget()
    found = cache.get(TileGemm())
    assert found == compiled
    assert found is not compiled
    assert found.seconds == compiled.seconds
    assert len(compiles.names) == 1


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(bytes(content))


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.compile
@pytest.mark.parametrize("damage", [truncate, empty, flip_a_bit, remove])
@pytest.mark.parametrize("file", FILES)
def test_damaged_entry_is_built_again(compiles, file, damage):
    compiled = cache.get(Scale(2.0))
    damage(entry_of(Scale(2.0)) / file)
    forget()
    assert cache.get(Scale(2.0)) == compiled
    assert len(compiles.names) == 2
    forget()
    cache.get(Scale(2.0))  # the entry built again is a good one
    assert len(compiles.names) == 2


@pytest.mark.compile
def test_every_flipped_bit_of_the_description_is_found_or_harmless(compiles):
    compiled = cache.get(Scale(2.0))
    path = entry_of(Scale(2.0)) / "meta.json"
    intact = path.read_bytes()
    for position in range(len(intact)):
        content = bytearray(intact)
        content[position] ^= 1 << position % 8
        path.write_bytes(bytes(content))
        assert cache._from_disk(cache.key(Scale(2.0))) in (None, compiled)


@pytest.mark.compile
def test_write_that_dies_before_the_rename_leaves_no_entry(compiles, monkeypatch):
    def die(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache.os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        cache.get(Scale(2.0))
    assert not entry_of(Scale(2.0)).exists()
    assert [path.suffix for path in cache.root().iterdir()] in ([], [".lock"])
    monkeypatch.undo()


@pytest.mark.compile
def test_entry_appears_complete_or_not_at_all(compiles, monkeypatch):
    seen = []
    write = cache._write

    def watched(path: Path, content: bytes) -> None:
        write(path, content)
        seen.append(entry_of(Scale(2.0)).exists())

    monkeypatch.setattr(cache, "_write", watched)
    cache.get(Scale(2.0))
    assert seen == [False] * len(FILES)
    assert sorted(path.name for path in entry_of(Scale(2.0)).iterdir()) == sorted(FILES)


@pytest.mark.compile
def test_folder_that_cannot_be_written_means_memory_only_and_one_warning(compiles, monkeypatch):
    blocked = cache.root().with_name("a file")
    blocked.write_text("")
    monkeypatch.setenv(cache.ENVIRONMENT, str(blocked / "cache"))
    with pytest.warns(UserWarning, match=rf"memory only.*set {cache.ENVIRONMENT}"):
        first = cache.get(Scale(2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.get(Scale(3.0))
        assert cache.get(Scale(2.0)) is first
    assert len(compiles.names) == 2


@pytest.mark.compile
def test_clear_forgets_entries_and_keeps_other_files(compiles):
    cache.get(Scale(2.0))
    foreign = cache.root() / "notes.txt"
    foreign.write_text("mine")
    cache.clear()
    assert list(cache.root().iterdir()) == [foreign]
    cache.get(Scale(2.0))
    assert len(compiles.names) == 2


@pytest.mark.compile
def test_failed_compile_is_not_remembered(compiles, monkeypatch):
    def fail(kernel, *, name):
        raise RuntimeError("no luck")

    monkeypatch.setattr(cache, "compile_kernel", fail)
    with pytest.raises(RuntimeError, match="no luck"):
        cache.get(Scale(2.0))
    monkeypatch.setattr(cache, "compile_kernel", compiles)
    assert cache.get(Scale(2.0)).arch == "sm_90a"


class Scaled(Scale):
    """A kernel with fields in its key text, as plans have."""

    def __init__(self, factor: float, arch: str = "sm_90a"):
        super().__init__(factor)
        self.arch = arch

    @property
    def key_text(self) -> str:
        return f"fp32\nSchedule(factor={self.factor}, live=1)"


@pytest.mark.compile
def test_the_log_and_explain_say_why_a_kernel_is_compiled(compiles, caplog, monkeypatch):
    caplog.set_level("INFO", logger="cutedsl_fa3")
    assert cache.explain(Scaled(2.0)) == "will be compiled as the first scale that is known here"
    cache.get(Scaled(2.0))
    first, compiled = (record.getMessage() for record in caplog.records)
    assert first == "scale is being compiled as the first scale that is known here"
    assert compiled.startswith("scale_") and " was compiled in " in compiled
    assert cache.explain(Scaled(2.0)).startswith(
        "compiled as the first scale that is known here, in"
    )

    why = "recompiled because schedule: factor 2.0 -> 3.0"
    assert cache.explain(Scaled(3.0)) == f"will be {why}"
    cache.get(Scaled(3.0))
    assert caplog.records[2].getMessage() == f"scale is being {why}"
    assert cache.explain(Scaled(3.0)).startswith(f"{why}, in this process; compiled in ")

    caplog.clear()
    forget()  # another process
    assert cache.explain(Scaled(3.0)).startswith("on disk, where it was compiled in ")
    cache.get(Scaled(3.0))
    assert cache.explain(Scaled(3.0)).startswith("from disk; compiled in ")
    cache.get(Scaled(3.0))
    assert not caplog.records

    monkeypatch.setattr(cache, "sources", lambda: {"file.py": "2"})
    forget()
    assert cache.explain(Scaled(3.0)) == "will be recompiled because sources changed: file.py"
    tools = cache.toolchain()
    other = type(tools)("4.8.0", tools.flavour, tools.ptxas, tools.torch)
    monkeypatch.setattr(cache, "toolchain", lambda: other)
    assert cache.explain(Scaled(3.0)).endswith(
        f"because cutlass {tools.cutlass} -> 4.8.0; sources changed: file.py"
    )


@pytest.mark.compile
def test_without_a_folder_kernels_in_memory_are_compared(compiles, monkeypatch):
    monkeypatch.setattr(cache, "root", lambda: None)
    monkeypatch.setattr(cache, "_warned", True)
    cache.get(Scaled(2.0))
    assert cache.explain(Scaled(3.0)) == "will be recompiled because schedule: factor 2.0 -> 3.0"


@pytest.mark.compile
def test_a_damaged_entry_is_the_reason_that_is_said(compiles):
    cache.get(Scaled(2.0))
    flip_a_bit(entry_of(Scaled(2.0)) / "kernel.o")
    forget()
    assert "damaged" in cache.explain(Scaled(2.0))
    empty(entry_of(Scaled(2.0)) / "meta.json")  # which says what the entry was
    assert cache.explain(Scaled(2.0)) == "will be compiled as the first scale that is known here"


FRESH_PROCESS = """
import sys
import torch
sys.path[:0] = {path!r}
from small_kernel import Scale
from cutedsl_fa3 import cache

def compile_kernel(kernel, *, name):
    raise AssertionError("compiled again")

cache.compile_kernel = compile_kernel
cache.sources = lambda: {{"file.py": "1"}}
first = cache.get(Scale(2.0))
second = cache.get(Scale(3.0))
assert first.function is not second.function
if torch.cuda.is_available():
    x = torch.ones(5000, device="cuda")
    for factor, compiled in ((2.0, first), (3.0, second), (2.0, first)):
        y = torch.empty_like(x)
        compiled.launch(x, y)
        assert torch.all(y == factor), (factor, y)
else:
    x = torch.ones(5000)
    for compiled in (first, second):
        try:
            compiled.function(x, x)
        except ValueError as error:
            assert "device_type=cuda" in str(error)
        else:
            raise AssertionError("a CPU tensor was accepted")
print(first.name, second.name, *first.symbols, *second.symbols)
"""


@pytest.mark.compile
def test_two_kernels_from_disk_keep_their_names_in_a_fresh_process(compiles):
    kernels = Scale(2.0), Scale(3.0)
    here = [cache.get(kernel) for kernel in kernels]
    code = FRESH_PROCESS.format(path=[str(ROOT), str(ROOT / "tests")])
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    names = result.stdout.split()
    assert names == [*(each.name for each in here), *(each.symbols[0] for each in here)]
    assert len(set(names)) == 4
    for kernel, each in zip(kernels, here, strict=True):
        assert each.name == f"scale_{cache.key(kernel)[:16]}"


def test_key_depends_on_all_that_affects_code(monkeypatch):
    keys = {
        cache.key(Scale(2.0)),
        cache.key(Scale(3.0)),
        cache.key(Scale(2.0, arch="sm_100a")),
        cache.key(TileGemm()),
    }
    monkeypatch.setattr(cache, "sources", lambda: {"file.py": "2"})
    keys.add(cache.key(Scale(2.0)))
    monkeypatch.undo()
    other = cache.toolchain()
    other = type(other)(other.cutlass, "cu12", "12.9", other.torch)
    monkeypatch.setattr(cache, "toolchain", lambda: other)
    keys.add(cache.key(Scale(2.0)))
    assert len(keys) == 6


def test_key_does_not_depend_on_torch(monkeypatch):
    before = cache.key(Scale(2.0))
    tools = cache.toolchain()
    other = type(tools)(tools.cutlass, tools.flavour, tools.ptxas, "1.0")
    monkeypatch.setattr(cache, "toolchain", lambda: other)
    assert cache.key(Scale(2.0)) == before


WEIGHT = 1.0


def helper(x):
    return x * WEIGHT


class Helped(Scale):
    """A kernel that reads a helper and a number of its module."""

    @cute.kernel
    def scale(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        if thread < cute.size(x):
            y[thread] = helper(x[thread])


def with_factor(hidden: float) -> type[Scale]:
    """A class whose methods close over a number that its key text does not name."""

    class Closing(Scale):
        @cute.kernel
        def scale(self, x: cute.Tensor, y: cute.Tensor):
            thread, _, _ = cute.arch.thread_idx()
            if thread < cute.size(x):
                y[thread] = x[thread] * hidden

    return Closing


def test_a_class_from_outside_is_known_by_what_it_traces_to(monkeypatch):
    before = cache.key(Helped(2.0))
    assert cache.key(Helped(2.0)) == before
    monkeypatch.setitem(globals(), "WEIGHT", 2.0)
    weighted = cache.key(Helped(2.0))
    monkeypatch.setitem(globals(), "helper", lambda x: x + 1.0)
    assert len({before, weighted, cache.key(Helped(2.0))}) == 3
    keys = [cache.key(with_factor(hidden)(2.0)) for hidden in (1.0, 3.0, 1.0)]
    assert keys[0] == keys[2] != keys[1]


def test_root_is_the_chosen_folder_or_one_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "here"))
    assert cache.root() == tmp_path / "here"
    monkeypatch.delenv(cache.ENVIRONMENT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.root() == tmp_path / "cutedsl_fa3"
