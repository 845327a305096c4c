import os
import subprocess
import sys

import jax
import pytest
from jax.sharding import AxisType

from taco_jax.sharding.mesh import ensure_devices, format_mesh, make_mesh, parse_mesh, resolve_sizes


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("dp4,pp4,tp8", (4, 4, 8)),
        ("tp8,dp4", (4, 1, 8)),
        ("pp3", (1, 3, 1)),
        (" dp2, tp2 ", (2, 1, 2)),
        ("dp-1,tp4", (-1, 1, 4)),
    ],
)
def test_a_mesh_is_read_in_any_order(text, sizes):
    parsed = parse_mesh(text)
    assert list(parsed.items()) == list(zip(("dp", "pp", "tp"), sizes, strict=True))
    assert parse_mesh(format_mesh(parsed)) == parsed


@pytest.mark.parametrize("text", ["", "tp0", "tp-2", "dp4pp4", "dp4,dp2", "ep4", "dp", "dp4,", "dp-1,tp-1", "dp2.5"])
def test_what_is_no_mesh(text):
    with pytest.raises(ValueError, match="mesh"):
        parse_mesh(text)


def test_one_axis_takes_the_rest_of_the_devices():
    assert resolve_sizes(parse_mesh("dp-1,tp4"), 8) == {"dp": 2, "pp": 1, "tp": 4}
    with pytest.raises(ValueError, match="needs a multiple of 3 devices, has 8"):
        resolve_sizes(parse_mesh("dp-1,tp3"), 8)


def test_tensor_parallel_devices_are_neighbours():
    mesh = make_mesh(parse_mesh("dp2,pp2,tp2"))
    assert mesh.axis_names == ("dp", "pp", "tp")
    assert mesh.axis_types == (AxisType.Auto,) * 3
    assert [d.id for d in mesh.devices.ravel()] == list(range(8))
    assert [d.id for d in mesh.devices[0, 0]] == [0, 1]


def test_a_smaller_mesh_takes_the_first_devices():
    assert [d.id for d in make_mesh(parse_mesh("tp3")).devices.ravel()] == [0, 1, 2]
    assert make_mesh(parse_mesh("dp-1,tp2")).devices.shape == (jax.device_count() // 2, 1, 2)


def test_too_few_devices_once_jax_is_up():  # E1
    have = jax.device_count()
    with pytest.raises(ValueError, match=f"needs 128, has {have}"):
        ensure_devices(128)


def run_python(code: str, **environment: str) -> str:
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    done = subprocess.run([sys.executable, "-c", code], env=kept | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_devices_are_emulated_and_flags_are_kept():  # E1
    out = run_python(
        "import os, jax\n"
        "from taco_jax.sharding.mesh import make_mesh, parse_mesh\n"
        "print(make_mesh(parse_mesh('dp2,tp3')).devices.shape, jax.device_count())\n"
        "print(os.environ['XLA_FLAGS'])",
        XLA_FLAGS="--xla_cpu_collective_call_terminate_timeout_seconds=77 --xla_force_host_platform_device_count=2",
        JAX_PLATFORMS="cpu",
    )
    shape, flags = out.splitlines()
    assert shape == "(2, 1, 3) 6"
    assert flags.startswith("--xla_cpu_collective_call_terminate_timeout_seconds=77 --xla_force_host")
    assert "warn_stuck_timeout_seconds=100" in flags and "1200" not in flags


def test_devices_are_not_emulated_after_jax_has_started():  # E1
    out = run_python(
        "import jax\n"
        "from taco_jax.sharding.mesh import make_mesh, parse_mesh\n"
        "jax.devices()\n"
        "try: make_mesh(parse_mesh('dp4,pp4,tp8'))\n"
        "except ValueError as error: print(error)",
        JAX_PLATFORMS="cpu",
    )
    assert out.startswith("not enough devices: needs 128, has 1 (cpu)")
