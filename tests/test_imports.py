"""Who may import whom, and that importing touches no device."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = [
    {"experiments"},
    {"taco_jax.models"},
    {"taco_jax.sharding"},
    {"taco_jax.collectives"},
    {"taco_jax.differentiation"},
    {"taco_jax.operations"},
    {"taco_jax.codec"},
    {"taco_jax.layout", "taco_jax.pallas", "taco_jax.scales"},
    {"taco_jax.wire", "taco_jax.hadamard", "taco_jax.compat", "taco_jax.config", "taco_jax.data"},
]
"""From the top: a module imports from its own layer or from those below it."""


def modules() -> dict[str, Path]:
    files = [*ROOT.glob("taco_jax/**/*.py"), *ROOT.glob("experiments/**/*.py")]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def layer(name: str) -> int:
    owners = [i for i, members in enumerate(LAYERS) for m in members if name == m or name.startswith(m + ".")]
    assert owners, f"{name} stands in no layer: add it to LAYERS"
    return owners[0]


def imports(name: str, file: Path) -> set[str]:
    """Modules of the project that a file imports anywhere, by their full names."""
    known = set(modules())
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            assert node.module is not None
            found |= {
                f"{node.module}.{a.name}" if f"{node.module}.{a.name}" in known else node.module for a in node.names
            }
    return {m for m in found if m.split(".")[0] in ("taco_jax", "experiments", "tests")}


@pytest.mark.parametrize("name", sorted(set(modules()) - {"taco_jax"}))
def test_imports_point_downwards(name):
    for imported in imports(name, modules()[name]):
        if imported == "taco_jax":
            # The public face stands above the library and below the trainer.
            assert layer(name) == 0, f"{name} imports the package that contains it"
            continue
        assert layer(imported) >= layer(name), f"{name} imports {imported}, which stands above it"
        assert not imported.startswith("tests")


def test_no_module_of_the_library_knows_a_mesh_or_flax_where_it_should_not():
    for name, file in modules().items():
        if name in ("taco_jax", "taco_jax.compat") or layer(name) < 3:
            continue
        text = file.read_text()
        assert "flax" not in text, name
        assert not any(alias in text for alias in ("import Mesh", "jax.make_mesh", "jax.sharding")), name


def test_oracles_share_nothing_with_the_library():
    text = (ROOT / "tests" / "oracles.py").read_text()
    roots = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert roots == {"math", "ml_dtypes", "numpy"}


def test_importing_touches_no_device():
    """So that the number of emulated devices can still be chosen, and other processes come up first."""
    code = (
        "import taco_jax, taco_jax.sharding.mesh\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=ROOT, timeout=120)
