"""Who may import whom, and that every way of installing gives the same import names."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DSL = ("cutlass", "cuda", "tvm_ffi")
KERNEL_SIDE = (*DSL, "cutedsl_fa3.kernels", "cutedsl_fa3.pipelines", "cutedsl_fa3.compile")


def imports(path: Path, package: str) -> set[str]:
    """Every module that a file names in an import, at any depth, as an absolute name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join(
                [*(parent if node.level else []), *([node.module] if node.module else [])]
            )
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("file", names(sources(ROOT / "layouts")))
def test_layouts_know_only_the_standard_library_and_the_dsl(file: str) -> None:
    for module in imports(ROOT / file, "cutedsl_fa3.layouts"):
        top = module.split(".")[0]
        allowed = top in sys.stdlib_module_names or within(module, "cutlass", "cutedsl_fa3.layouts")
        assert allowed, f"{file} imports {module}"


@pytest.mark.parametrize("file", names(sources(ROOT / "pipelines")))
def test_pipelines_know_layouts_but_neither_torch_nor_attention(file: str) -> None:
    for module in imports(ROOT / file, "cutedsl_fa3.pipelines"):
        top = module.split(".")[0]
        allowed = top in sys.stdlib_module_names or within(
            module, "cutlass", "cutedsl_fa3.layouts", "cutedsl_fa3.pipelines"
        )
        assert allowed, f"{file} imports {module}"


ON_DEVICE = ("lower.py", "device.py")  # of the variant language


def host_only() -> list[Path]:
    variant = ROOT / "cutedsl_fa3" / "variant"
    beside = [ROOT / "cutedsl_fa3" / name for name in ("reference.py", "masks.py", "scores.py")]
    return [path for path in sources(variant) if path.name not in ON_DEVICE] + beside


@pytest.mark.parametrize("file", names(host_only()))
def test_the_variant_language_and_the_reference_know_no_kernel_and_no_dsl(file: str) -> None:
    path = ROOT / file
    package = ".".join(path.parent.relative_to(ROOT).parts)
    for module in imports(path, package):
        assert not within(module, *KERNEL_SIDE), f"{file} imports {module}"


@pytest.mark.parametrize("file", names(sources(ROOT / "cutedsl_fa3")))
def test_layouts_and_pipelines_are_imported_by_their_installed_names(file: str) -> None:
    package = ".".join((ROOT / file).parent.relative_to(ROOT).parts)
    for module in imports(ROOT / file, package):
        assert not within(module, "layouts", "pipelines"), f"{file} imports {module}"


def test_the_import_rules_would_notice_a_forbidden_import(tmp_path: Path) -> None:
    file = tmp_path / "tile.py"
    file.write_text("def f():\n    import torch\n    from ..pipelines import Ring\n")
    found = imports(file, "cutedsl_fa3.layouts")
    assert "torch" in found
    assert "cutedsl_fa3.pipelines.Ring" in found


WITHOUT_DSL = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cutlass", "tvm_ffi", "cuda"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
"""


@pytest.mark.parametrize("module", ["cutedsl_fa3", "cutedsl_fa3.cli"])
def test_it_imports_where_the_dsl_is_absent(module: str) -> None:
    run = [sys.executable, "-c", f"{WITHOUT_DSL}\nimport {module}"]
    result = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources elsewhere: setuptools leaves build/ and egg-info beside what it builds."""
    files = [ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE")]
    for folder in ("cutedsl_fa3", "layouts", "pipelines"):
        files += sources(ROOT / folder)
    for path in files:
        target = tmp_path / "source" / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return tmp_path / "source"


def build(copy: Path, hook: str) -> Path:
    """The wheel that a build backend hook makes, without a network."""
    code = f"from setuptools import build_meta; build_meta.{hook}('.')"
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True)
    return next(copy.glob("*.whl"))


def installed_layouts(site: Path) -> Path:
    """Where `cutedsl_fa3.layouts` comes from in an interpreter with `site` before its own."""
    code = (
        "import site, sys\n"
        # This checkout may itself be installed; an editable one has a finder.
        "sys.meta_path[:] = [f for f in sys.meta_path if '__editable__' not in f.__module__]\n"
        "for name in [name for name in sys.modules if name.startswith('__editable__')]:\n"
        "    del sys.modules[name]\n"
        f"sys.path.insert(0, {str(site)!r})\n"
        f"site.addsitedir({str(site)!r})\n"
        "import cutedsl_fa3.pipelines, cutedsl_fa3.layouts.errors as found; print(found.__file__)"
    )
    run = [sys.executable, "-I", "-c", code]
    result = subprocess.run(run, cwd=site, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return Path(result.stdout.strip())


@pytest.mark.slow
def test_a_wheel_holds_layouts_and_pipelines_inside_the_package(copy: Path) -> None:
    wheel = build(copy, "build_wheel")
    inside = set(zipfile.ZipFile(wheel).namelist())
    expected = set(names(sources(ROOT / "cutedsl_fa3")))
    for folder in ("layouts", "pipelines"):
        expected |= {f"cutedsl_fa3/{name}" for name in names(sources(ROOT / folder))}
    assert expected <= inside
    assert not {name for name in inside if name.startswith(("layouts/", "pipelines/"))}

    site = copy.parent / "site"
    zipfile.ZipFile(wheel).extractall(site)
    assert installed_layouts(site) == site / "cutedsl_fa3" / "layouts" / "errors.py"


@pytest.mark.slow
def test_an_editable_install_reads_layouts_from_the_checkout(copy: Path) -> None:
    site = copy.parent / "site"
    zipfile.ZipFile(build(copy, "build_editable")).extractall(site)
    assert installed_layouts(site) == copy / "layouts" / "errors.py"


def test_a_checkout_needs_no_installation(tmp_path: Path) -> None:
    link = tmp_path / "checkout.pth"
    link.write_text(str(ROOT))
    assert installed_layouts(tmp_path) == ROOT / "layouts" / "errors.py"
