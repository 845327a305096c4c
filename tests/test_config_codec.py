"""Codec and Compression validate themselves and say what would be right."""

import dataclasses

import ml_dtypes
import pytest

from taco_jax.config import PRESETS, QMAX, Codec, Compression, as_compression


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "int5"}, "'e3m4', 'int8', 'int6', 'int4', 'bf16', got 'int5'"),
        ({"block": 100}, "block must be one of 32, 64, 128, 256, 512, got 100"),
        ({"hadamard": True}, "hadamard must be one of None, 'block', got True"),
        ({"hadamard": "tensor"}, "hadamard must be one of"),
        ({"scale": "tensor"}, "scale must be one of 'block', 'adaptive', 'paper', 'none', got 'tensor'"),
        ({"scale_dtype": "f32"}, "scale_dtype must be one of 'bf16', 'e8m0', got 'f32'"),
        ({"layout": "rows"}, "layout must be one of 'hidden', 'tokens', got 'rows'"),
        ({"format": "int8", "scale": "adaptive"}, 'int8 needs scale="block"'),
        ({"format": "int4", "scale": "adaptive"}, 'loses most of the values; use the preset "int4"'),
        ({"format": "e3m4", "scale": "adaptive"}, 'e3m4 needs scale="block"'),
        ({"format": "int6", "scale_dtype": "e8m0"}, 'int6 needs scale_dtype="bf16"'),
        ({"rounding": "up"}, "rounding must be one of 'nearest', 'stochastic'"),
        (
            {"scale": "paper", "hadamard": "block", "rounding": "stochastic"},
            '"adaptive" or "block", got \'paper\'',
        ),
        ({"signs": 1}, "without a transform signs change nothing"),
        ({"signs": -1, "hadamard": "block"}, "signs=-1 is a seed of 0 or more"),
        ({"format": "int8", "scale_dtype": "e8m0"}, 'int8 needs scale_dtype="bf16"'),
        ({"scale": "none"}, 'format="bf16" and scale="none" belong together'),
        ({"format": "bf16"}, 'use the preset "bf16"'),
        ({"scale": "paper"}, 'format="e4m3", hadamard="block", its factors in f32'),
        ({"scale": "paper", "format": "e5m2", "hadamard": "block"}, "got 'e5m2', 'block'"),
        ({"scale": "paper", "scale_dtype": "e8m0", "hadamard": "block"}, "scale_dtype='e8m0'"),
    ],
)
def test_codec_refuses_what_has_no_meaning(options, message):
    with pytest.raises(ValueError) as error:
        Codec(**options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_bytes": -1}, "min_bytes must be 0 or more, got -1"),
        ({"chunks": 0}, "chunks must be 1 or more, got 0"),
    ],
)
def test_compression_refuses_what_has_no_meaning(options, message):
    with pytest.raises(ValueError, match=message):
        Compression.named("taco", **options)


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(
        ValueError, match="'tako'; there are taco, taco_block, paper, fp8, int8, int6, int4, bf16, none"
    ):
        Compression.named("tako")
    with pytest.raises(ValueError, match="'tako'"):
        as_compression("tako")


def test_presets_are_what_the_design_says():
    forward = {name: Compression.named(name).forward for name in PRESETS}
    assert list(forward) == ["taco", "taco_block", "paper", "fp8", "int8", "int6", "int4", "bf16", "none"]
    assert forward == {
        "taco": Codec("e4m3", 128, "block", "adaptive"),
        "taco_block": Codec("e4m3", 128, "block", "block"),
        "paper": Codec("e4m3", 256, "block", "paper"),
        "fp8": Codec("e4m3", 128, None, "block"),
        "int8": Codec("int8", 128, "block", "block"),
        "int6": Codec("int6", 128, "block", "block"),
        "int4": Codec("int4", 128, "block", "block"),
        "bf16": Codec("bf16", 128, None, "none"),
        "none": None,
    }
    assert all(Compression.named(name).backward == forward[name] for name in PRESETS)


def test_metadata_on_the_wire():
    assert Codec(scale="adaptive").scale_bytes == 0
    assert Codec().scale_bytes == 2
    assert Codec(scale_dtype="e8m0").scale_bytes == 1
    assert Codec(hadamard="block", scale="paper").scale_bytes == 8
    floats = {name: ml_dtypes.finfo(name) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e3m4", "bfloat16")}
    maxima = dict(zip(("e4m3", "e5m2", "e3m4", "bf16"), (float(info.max) for info in floats.values()), strict=True))
    assert QMAX == maxima | {"int8": 127.0, "int6": 31.0, "int4": 7.0}
    assert [Codec(name).value_bits for name in ("e3m4", "int8", "int6", "int4")] == [8, 8, 6, 4]


def test_named_changes_fields_and_keeps_the_rest():
    changed = Compression.named("int8", backward=None, min_bytes=0)
    assert changed == Compression(Codec("int8", hadamard="block"), None, min_bytes=0)
    assert not changed.is_exact and not changed.is_adaptive
    assert Compression.named("none").is_exact
    assert Compression(None, Codec(scale="adaptive")).is_adaptive


def test_configs_are_frozen_and_hashable():
    compression = Compression.named("taco")
    assert hash(compression) == hash(Compression.named("taco"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        compression.chunks = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Codec().block = 64


def test_none_and_configs_pass_through_as_compression():
    assert as_compression(None) == Compression(None, None)
    compression = Compression.named("fp8", chunks=3)
    assert as_compression(compression) is compression
