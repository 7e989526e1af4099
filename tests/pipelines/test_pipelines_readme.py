"""The example kernel of pipelines/README.md, compiled and held against its own tables."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import cutlass
import cutlass.cute as cute
import pytest
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cutedsl_fa3 import pipelines
from cutedsl_fa3.audit import audit
from cutedsl_fa3.compile import compile_kernel
from cutedsl_fa3.errors import LayoutError

README = Path(pipelines.__file__).with_name("README.md").read_text()


@dataclass(frozen=True)
class Io:
    """What the example reads and writes."""

    x: tuple[cute.CopyAtom, cute.Tensor]
    y: tuple[cute.CopyAtom, cute.Tensor]
    blocks: cutlass.Int32


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory):
    """The class of the example; the compiler reads kernels from source files."""
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    path = tmp_path_factory.mktemp("readme") / "readme_copy.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("readme_copy", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["readme_copy"] = module
    spec.loader.exec_module(module)
    return module.Copy


def launchable(copy: type, stages: int):
    """The example with a host function around it."""

    class Launched(copy):
        arch, name, key_text = "sm_90a", "readme_copy", f"readme_copy {stages}"

        def fake_args(self) -> tuple:
            def matrix():
                shape, strides = (cute.sym_int(), 64), (cute.sym_int64(divisibility=8), 1)
                return make_fake_tensor(cutlass.BFloat16, shape, strides, assumed_align=16)

            return matrix(), matrix(), make_fake_stream(use_tvm_ffi_env_stream=True)

        def expected(self):
            return self.common_expectations({"x": 1}, {"x": self.tiles["x"]})

        @cute.jit
        def host(self, x: cute.Tensor, y: cute.Tensor, stream):
            tile = self.tiles["x"]
            blocks = cute.ceil_div(x.shape[0], tile.rows)
            io = Io(tuple(tile.load_atom(x)), tuple(tile.store_atom(y)), blocks)
            self.launch(io, (1, 1, 1), stream)

    return Launched(stages)


@pytest.mark.compile
@pytest.mark.parametrize("stages", [1, 4])
def test_the_example_compiles_to_what_its_tables_promise(example, stages):
    kernel = launchable(example, stages)
    kernel.check()
    compiled = compile_kernel(kernel)
    report = audit(kernel, compiled)
    assert report.ok, str(report)
    assert compiled.resources.spills == 0
    assert compiled.resources.advisories == ()
    assert compiled.resources.smem_dynamic == kernel.smem.total


def test_the_example_is_refused_where_it_does_not_fit(example):
    example(14).check()
    with pytest.raises(LayoutError, match="14 stages of 'x' would fit"):
        example(15).check()


def test_every_module_is_in_the_table():
    modules = {path.stem for path in Path(pipelines.__file__).parent.glob("[a-z]*.py")}
    assert set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)) == modules
