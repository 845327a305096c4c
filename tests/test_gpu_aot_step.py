"""The whole training step at tp=8, compiled for GPUs on a machine without one; `test_gpu_aot.py` says what it needs."""

import json
from collections import Counter
from pathlib import Path

import pytest
from gpu_aot import process, ptx

from experiments.hlo import read_collectives
from experiments.overlap import AXES, figures
from experiments.schedule import count_launches, read_transfers

pytestmark = pytest.mark.gpu_aot

VARIANTS = {
    "h200": (
        "taco-1-triton-trainer",
        "taco-2-triton-xla",
        "taco-2-triton-trainer",
        "none-1-auto-trainer",
        "two_hop-triton",
        "two_hop-xla",
    ),
    "h100": ("taco-1-triton-trainer",),
    "b200": ("taco-1-triton-trainer",),
    "a100": ("int8-1-triton-trainer",),
}
RESIDUAL = 4 * 1024 * 1024
"""Values that a psum of a layer keeps for the backward pass; there are two in each of four layers."""


@pytest.fixture(scope="module", params=VARIANTS)
def compiled(request, tmp_path_factory) -> tuple[str, Path]:
    """Name of a GPU and the folder with the programs and kernels compiled for it."""
    process.require_compiler()
    folder = tmp_path_factory.mktemp(request.param)
    variants = VARIANTS[request.param]
    process.run("gpu_aot.train_step", request.param, str(folder), *variants, timeout=560, **process.dumping_ptx(folder))
    return request.param, folder


@pytest.fixture
def h200(compiled):
    if compiled[0] != "h200":
        pytest.skip("compared on the H200 only")
    return compiled[1]


def step_of(compiled) -> tuple[str, dict]:
    """HLO of the step with one chunk, and what the program said about it."""
    gpu, folder = compiled
    variant = VARIANTS[gpu][0]
    return (folder / f"{variant}.hlo").read_text(), json.loads((folder / f"{variant}.json").read_text())


def test_every_large_message_over_tp_is_uint8_and_planned(compiled):
    text, report = step_of(compiled)
    large = [c for c in read_collectives(text, AXES) if c.axis == "tp" and c.payload_bytes >= 65536]
    assert {c.dtype for c in large} == {"u8"}
    found = Counter()
    for c in large:
        found[c.op, c.site, c.direction, c.payload_bytes] += c.count
    planned = Counter()
    for *key, count in report["plan"]:
        planned[tuple(key)] += count
    # Two layer sites each way in four layers, the embedding and the head's input: each two hops.
    assert found == planned and sum(found.values()) == 36


def test_messages_are_asynchronous_and_some_travel_behind_gemms(compiled):
    text, _ = step_of(compiled)
    transfers = read_transfers(text, AXES)
    assert len(transfers) == 12 and all(t.asynchronous for t in transfers)
    assert any(w.kind == "gemm" for t in transfers for w in t.cover)


def test_our_kernels_spill_nothing(compiled):
    gpu, folder = compiled
    kernels = ptx.read_kernels(folder, "taco_")
    assert {k.name for k in kernels} >= {"taco_encode", "taco_reduce", "taco_decode"}
    assert {k.arch for k in kernels} == {process.ARCHITECTURES[gpu]}
    assert [k.name for k in kernels if k.stack or k.spill_stores or k.spill_loads] == []


def test_residuals_of_one_byte_lower_the_peak(h200):
    """Of the 32 MiB that the residuals differ by, at least half is left at the peak."""
    one_byte, two_bytes = (
        json.loads((h200 / f"{name}-trainer.json").read_text())["temporary"]
        for name in ("taco-1-triton", "none-1-auto")
    )
    print(f"temporary memory of the step: uint8 residuals {one_byte:,} bytes, bf16 {two_bytes:,}")
    assert two_bytes - one_byte >= 8 * RESIDUAL / 2


def test_fused_kernels_save_launches(h200):
    fused, plain = (sum(count_launches((h200 / f"two_hop-{i}.hlo").read_text()).values()) for i in ("triton", "xla"))
    print(f"launches of an all-reduce: {fused} with kernels, {plain} in plain jnp")
    assert fused <= 0.7 * plain


def test_two_chunks_hide_every_message(h200):
    one, joined, apart = (
        figures((h200 / f"taco-{variant}.hlo").read_text())
        for variant in ("1-triton-trainer", "2-triton-xla", "2-triton-trainer")
    )
    print(*(f"{f['hidden']} of {f['messages']} hidden" for f in (one, joined, apart)), sep="; ")
    assert (one["messages"], joined["messages"], apart["messages"]) == (36, 72, 72)
    assert one["hidden"] < 36 and apart["hidden"] == 72
    # Left to itself XLA joins the all-gathers of the two chunks.
    assert {t["arrays"] for t in joined["transfers"]} == {1, 2}
    assert {t["arrays"] for t in apart["transfers"]} == {1}
