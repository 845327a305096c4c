"""Imports point one way, and importing the library touches no device."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

# A module may import from the layers above its own line, and from its own line where `same` allows it.
LAYERS = (
    ("taco_jax.config", "taco_jax.compat", "taco_jax.hadamard", "taco_jax.wire"),
    ("taco_jax.scales", "taco_jax.layout"),
    ("taco_jax.pallas",),
    ("taco_jax.codec",),
    ("taco_jax.operations",),
    ("taco_jax.collectives",),
    ("taco_jax",),
    ("taco_jax.sharding",),
    ("taco_jax.models",),
    ("experiments",),
)


def layer_of(module: str) -> int:
    """Index of the layer whose name is the longest prefix of `module`."""
    names = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if (prefix := ".".join(parts[:end])) in names:
            return names[prefix]
    raise AssertionError(f"{module} belongs to no layer; add it to LAYERS")


def own_imports(path: Path) -> set[str]:
    """Modules of this project that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            files = {name for name in inner if is_module(name)}
            found |= files | ({str(node.module)} if len(files) < len(inner) else set())
    return {name for name in found if name.split(".")[0] in ("taco_jax", "experiments", "tests")}


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or path.is_dir()


def modules() -> dict[str, Path]:
    files = [p for package in ("taco_jax", "experiments") for p in (ROOT / package).rglob("*.py")]
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in files}


def test_imports_point_from_experiments_to_config():
    wrong = [
        f"{module} imports {imported}"
        for module, path in modules().items()
        for imported in own_imports(path)
        if layer_of(imported) > layer_of(module)
    ]
    assert wrong == []


def test_the_walk_sees_the_imports_it_judges():
    imported = own_imports(ROOT / "taco_jax" / "collectives.py")
    assert {"taco_jax.operations", "taco_jax.scales", "taco_jax.compat"} <= imported
    assert layer_of("taco_jax.pallas.xla") < layer_of("taco_jax.collectives") < layer_of("taco_jax.models.gpt")


def test_kernels_know_no_mesh_and_no_flax_and_models_know_no_mesh():
    for package, words in (("pallas", ("flax", "axis_name", "shard_map")), ("models", ("Mesh", "shard_map", "psum"))):
        for path in (ROOT / "taco_jax" / package).glob("*.py"):
            names = {n.id for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Name)}
            attributes = {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
            assert not (names | attributes) & set(words), path


def test_importing_touches_no_device():
    code = """
import taco_jax, taco_jax.models.gpt, taco_jax.sharding.pipeline, taco_jax.pallas.xla
import experiments.config, experiments.recipes, experiments.cli
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
