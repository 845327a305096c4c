"""What is particular to the Triton kernels; `test_contract.py` has what every implementation must do."""

import re

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import P, mesh, spmd

import taco_jax
from taco_jax import codec as codecs
from taco_jax.config import Codec
from taco_jax.pallas import registry, triton, triton_kernels, triton_sm80

TACO = Codec("e4m3", 128, "block", "adaptive")


@pytest.mark.parametrize(
    ("rows", "dtype"), [(33, jnp.float16), pytest.param(257, jnp.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("codec", [TACO, Codec("int8", 128, "block")], ids=["taco", "int8"])
def test_tiles_that_are_not_full(rows, dtype, codec):
    """A tile has 64 rows of 128; messages of one, two and all rows of it have their scales in different places."""
    x = jnp.asarray(np.random.default_rng(rows).standard_normal((rows, 2, 128)) * 4, dtype)
    for shape in ((rows, 2, 128), (2 * rows * 128,)):
        expected, got = (
            contract.call("encode", codec, np.dtype(dtype).name, name, x.reshape(shape))
            for name in ("xla", "triton_interpret")
        )
        contract.assert_same(got[0], expected[0], codec)
        np.testing.assert_allclose(got[1], expected[1], rtol=contract.OBSERVED_TOLERANCE)


@pytest.mark.parametrize("divisor", [448.0, 57344.0, 127.0, 1.0078125, 1.9921875, 2.0**-126, 2.0**100 * 1.5])
def test_division_is_corrected_to_the_nearest(divisor):
    """From an inverse that is two units off, as a GPU's division may be; float64 rounds rightly to float32."""
    x = np.random.default_rng(0).uniform(1, 2, 1 << 14).astype(np.float32)
    exact = (x.astype(np.float64) / divisor).astype(np.float32)
    off = np.float32(1 / divisor)
    for _ in range(2):
        off = np.nextafter(off, np.float32(np.inf))

    class Off:
        """A divisor whose inverse is that of a GPU."""

        def __rtruediv__(self, one):
            return jnp.float32(off)

        def __rmul__(self, x):
            return x * jnp.float32(divisor)

    np.testing.assert_array_equal(triton_kernels._divided(jnp.asarray(x), Off()), exact)
    np.testing.assert_array_equal(triton_kernels._divided(jnp.asarray(x), divisor), exact)


def test_more_than_indices_can_count_is_refused():
    x = jax.ShapeDtypeStruct((2**25, 128), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="4294967296 values .* use more chunks"):
        jax.eval_shape(lambda x: codecs.encode(x, TACO, jnp.float32(1), implementation="triton_interpret"), x)


def test_every_kernel_is_named():
    def all_reduce(x, scales):
        compression = taco_jax.Compression.named("taco", min_bytes=0, implementation="triton_interpret")
        return taco_jax.psum(x, "tp", compression=compression, scales=scales)

    mapped = spmd(all_reduce, mesh(tp=4), (P("tp"), P()), P(), check_vma=False)
    text = str(jax.make_jaxpr(mapped)(jnp.zeros((8, 128)), taco_jax.init_scales({"": "taco"})[""]))
    assert all(f"taco_{kernel}" in text for kernel in ("encode", "reduce", "decode"))


def test_a_name_never_falls_back():
    with pytest.raises(NotImplementedError, match="'triton': .*not \"paper\""):
        registry.resolve("triton", Codec("e4m3", 256, "block", "paper"), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="float64"):
        registry.resolve("triton", TACO, np.dtype("float64"))
    with pytest.raises(ValueError, match="'cuda'; there are triton, triton_sm80, mosaic_gpu, xla, triton_interpret"):
        registry.resolve("cuda", TACO, jnp.bfloat16)


def test_without_a_name_the_cpu_gets_the_plain_implementation():
    assert registry.resolve(None, TACO, jnp.bfloat16).__name__ == "taco_jax.pallas.xla"


@pytest.mark.parametrize(
    ("capability", "reason"),
    [("8.6", "8.9, .*8.6, .*'triton_sm80'"), ("7.5", "8.0, .*7.5$"), ("gfx942", "NVIDIA"), ("", "NVIDIA")],
)
def test_devices_that_are_refused(capability, reason):
    assert re.search(reason, triton.device_unsupported_reason(TACO, capability))
    older = triton_sm80.device_unsupported_reason(TACO, capability)
    assert older is None if capability == "8.6" else re.search(reason, older)


def test_devices_that_are_served():
    assert [triton.device_unsupported_reason(TACO, c) for c in ("8.9", "9.0", "10.0", "12.0")] == [None] * 4
    assert [triton_sm80.device_unsupported_reason(TACO, c) for c in ("8.0", "9.0")] == [None] * 2


def test_axes_left_to_xla():
    """XLA would gather them around each kernel."""

    def all_reduce(x, scales):
        compression = taco_jax.Compression.named("taco", min_bytes=0, implementation="triton")
        return taco_jax.psum(x, "tp", compression=compression, scales=scales, split_dim=0)

    mapped = spmd(all_reduce, mesh(dp=2, tp=4), (P("tp"), P()), P(), axis_names={"tp"})
    with pytest.raises(NotImplementedError, match="partitions itself, .*dp"):
        jax.eval_shape(mapped, jnp.zeros((16, 128)), taco_jax.init_scales({"": "taco"})[""])
