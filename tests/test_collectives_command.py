"""`python -m experiments.collectives`: bytes and errors by formulas of their own, and mistakes."""

import csv
import json

import jax
import pytest

import taco_jax
from experiments import collectives, rounding
from experiments.collective_times import NOT_SERVED, OPERATIONS, Row, crossover

pytestmark = pytest.mark.usefixtures("quickly_compiled")

RANKS, SIZE = 4, 16384
VALUES = SIZE // 2
# Bytes on the wire per 256 values: a scale of 2 bytes per 128, or two f32 factors per 256.
PER_256 = {"taco": 256, "taco_block": 260, "fp8": 260, "int8": 260, "paper": 264, "int6": 196, "int4": 132}
SHARE = {"psum": 1.5, "psum_scatter": 0.75, "all_gather": 0.75, "all_to_all": 0.75, "ppermute": 1.0}


@pytest.fixture(scope="module")
def measured(tmp_path_factory, quickly_compiled):
    folder = tmp_path_factory.mktemp("collectives")
    names = "none", *PER_256
    code = collectives.main(
        ["--devices=4", f"--min-size={SIZE}", f"--max-size={SIZE}", "--rounds=1", "--compressions", *names,
         f"--json={folder / 'a.json'}", f"--csv={folder / 'a.csv'}"]
    )  # fmt: skip
    assert code == 0
    with (folder / "a.csv").open(newline="") as file:
        return json.loads((folder / "a.json").read_text()), list(csv.DictReader(file))


def test_every_operation_and_compression_has_a_row(measured):
    report, table = measured
    wanted = [(operation, name) for operation in OPERATIONS for name in ("none", *PER_256)]
    assert [(row["operation"], row["compression"]) for row in report["rows"]] == wanted
    assert [(row["operation"], row["compression"]) for row in table] == wanted
    assert [int(row["wire_bytes"]) for row in table] == [row["wire_bytes"] for row in report["rows"]]
    assert (report["devices"], report["dtype"], report["sizes"]) == (RANKS, "bfloat16", [SIZE])


def test_bytes_ratio_and_bandwidth(measured):
    for row in measured[0]["rows"]:
        share = SHARE[row["operation"]]
        if row["compression"] != "none":
            assert row["wire_bytes"] == share * VALUES * PER_256[row["compression"]] / 256
        assert row["ratio"] == pytest.approx(share * SIZE / row["wire_bytes"])
        assert row["algorithm_gb_per_s"] == pytest.approx(SIZE / row["seconds"] / 1e9)
        assert row["bus_gb_per_s"] == pytest.approx(share * SIZE / row["seconds"] / 1e9)


def test_errors_are_those_of_the_formats(measured):
    """Within 0.6 dB of what the format's grid leaves; through lax exact, but for the sums' rounding to bf16."""
    for row in measured[0]["rows"]:
        if row["compression"] == "none":
            sums = row["operation"] in ("psum", "psum_scatter")
            assert row["exact"] != sums
            assert (row["snr_db"] > 50) if sums else row["snr_db"] is None
            continue
        codec = taco_jax.Compression.named(row["compression"]).forward
        two_hops = row["operation"] == "psum"
        expected = rounding.all_reduce_snr_db(codec, RANKS) if two_hops else rounding.round_trip_snr_db(codec)
        assert abs(row["snr_db"] - expected) <= 0.6, row


def test_speedup_is_against_lax_of_the_same_operation(measured):
    rows = measured[0]["rows"]
    lax = {row["operation"]: row["seconds"] for row in rows if row["compression"] == "none"}
    assert all(row["speedup"] == pytest.approx(lax[row["operation"]] / row["seconds"]) for row in rows)


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [
        ((0.5, 1.2, 1.5), 2),
        ((1.2, 0.9, 1.5), 4),
        ((1.1, 1.2, 1.3), 1),
        ((1.5, 1.2, 0.9), None),
        ((1.0,), None),
        ((), None),
    ],
)
def test_crossover_holds_from_a_size_on(speedups, expected):
    pairs = list(zip((1, 2, 4), speedups, strict=False))
    assert crossover(pairs) == crossover(pairs[::-1]) == expected


def test_crossover_in_words():
    seconds = {"none": (1, 2), "bf16": (2, 4), "int8": (2, 1), "fp8": (3, 3)}
    rows = [
        Row("psum", name, size, seconds=s)
        for name, both in seconds.items()
        for size, s in zip((1024, 4096), both, strict=True)
    ]
    rows.append(Row("psum", "paper", 4096))
    said = [
        [collectives.crossover_text("psum", name, rows, baseline) for name in ("int8", "fp8", "paper")]
        for baseline in ("none", "bf16")
    ]
    assert said[0] == ["4 KiB", "never up to 4 KiB", "lax not timed"]
    assert said[1] == ["4 KiB", "4 KiB", "bf16 not timed"]


def test_compression_that_is_not_on_the_wire_ends_with_4(monkeypatch, capsys):
    def uncompressed(x, axis_name, **options):
        return jax.lax.psum(x, axis_name)

    monkeypatch.setattr(taco_jax, "psum", uncompressed)
    argv = ["--devices=4", "--min-size=1KiB", "--max-size=1KiB", "--operations=psum", "--compressions=int8"]
    assert collectives.main(argv) == 4
    assert "psum of 1024 bytes with int8: the program sends" in capsys.readouterr().err


def test_what_is_left_out_says_why():
    row = Row("psum_scatter", "none", 1024, skipped=NOT_SERVED)
    assert collectives.operation_table("psum_scatter", [row]).caption == f"left out: {NOT_SERVED}"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--compressions=fp9", "--compressions must be some of"),
        ("--operations=pmean", "--operations must be some of"),
        ("--min-size=64MB", "--min-size must be a size such as 64KiB"),
        ("--min-size=128MiB", "more than --max-size"),
        ("--factor=1", "--factor must be 2 or more, got 1"),
        ("--rounds=0", "--rounds must be 1 or more, got 0"),
        ("--seed=-1", "--seed must be 0 or more, got -1"),
        ("--devices=1", "--devices must be 2 or more, got 1"),
        ("--devices=1000", "1000 devices are needed, there are"),
        ("--min-size=1001", "a size must be a multiple of 16 bytes"),
        ("--json=/nowhere/a.json", "there is no folder /nowhere"),
        ("--num-processes=0", "--num-processes must be 1 or more, got 0"),
        ("--process-id=1", "can only go with --coordinator"),
    ],
)
def test_mistakes_are_one_line(flag, message, capsys, monkeypatch):
    monkeypatch.setattr(collectives, "measure", lambda *_: pytest.fail("something was measured"))
    assert collectives.main([flag]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
