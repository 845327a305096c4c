"""Throughput over shaped links: the bytes that cross, the comparison with its bound, and the command itself."""

import csv
import dataclasses
import json
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import link_workers, netns, throughput, throughput_report
from experiments.throughput_report import Row
from experiments.traffic import Collective


def collective(op: str, groups, size: int, count: int = 1, name: str = "") -> Collective:
    return Collective(op, "tp", len(groups[0]), (("u8", size),), Fraction(count), name, groups)


def hosts(*of_device: int):
    """Stands for a mesh: the process of each device, in mesh order."""
    devices = np.array([SimpleNamespace(process_index=p) for p in of_device]).reshape(1, -1, 2)
    return SimpleNamespace(devices=devices, axis_names=("dp", "pp", "tp"))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        # Each of four devices keeps a quarter of its 400 bytes.
        ("all-to-all", {0: 300, 1: 300, 2: 300, 3: 300}),
        ("all-gather", {0: 1200, 1: 1200, 2: 1200, 3: 1200}),
        ("all-reduce", {0: 600, 1: 600, 2: 600, 3: 600}),
        ("reduce-scatter", {0: 300, 1: 300, 2: 300, 3: 300}),
    ],
)
def test_every_byte_crosses_where_each_device_has_a_host(op, expected):
    found = link_workers.bytes_over_links([collective(op, ((0, 1, 2, 3),), 400)], hosts(0, 1, 2, 3))
    assert found == expected


def test_bytes_that_stay_on_a_host_are_not_counted():
    two_hosts = hosts(0, 0, 1, 1)
    # Devices 0 and 1 send two of four parts of 100 bytes to the other host; a ring crosses at 1 -> 2 and 3 -> 0.
    assert link_workers.bytes_over_links([collective("all-to-all", ((0, 1, 2, 3),), 400)], two_hosts) == {
        0: 400, 1: 400,
    }  # fmt: skip
    assert link_workers.bytes_over_links([collective("all-reduce", ((0, 1, 2, 3),), 400)], two_hosts) == {
        0: 600, 1: 600,
    }  # fmt: skip
    assert link_workers.bytes_over_links([collective("all-reduce", ((0, 1), (2, 3)), 400)], two_hosts) == {
        0: 0, 1: 0,
    }  # fmt: skip
    moves = collective("collective-permute", ((0, 2), (1, 0)), 50, count=3)
    assert link_workers.bytes_over_links([moves], two_hosts) == {0: 150, 1: 0}


def test_only_the_first_stage_sends_the_embedding():
    groups = ((0, 1), (2, 3))  # of tp, one for each of two stages
    for site, expected in (("embedding", {0: 50, 1: 50, 2: 0, 3: 0}), ("mlp", dict.fromkeys(range(4), 50))):
        message = collective("all-to-all", groups, 100, name=f"jit(step)/taco.psum.{site}.forward/all_to_all")
        assert message.site == site
        assert link_workers.bytes_over_links([message], hosts(0, 1, 2, 3)) == expected


def row(compression: str, seconds: float, payload: float, mesh: str = "tp2", rate: str = "10mbit") -> Row:
    return Row(mesh, 2, rate, compression, seconds, seconds, seconds, 6, payload * 1.05, payload, payload, 0.1)


def test_the_bound_is_amdahls():
    rows = [row("bf16", 10.0, 8e6), row("taco", 6.0, 4e6), row("alone", 1.0, 0.0)]
    base, taco = throughput_report.compare(rows)
    assert base.speed_up == 1.0 and base.exposed == pytest.approx(0.9)
    assert taco.speed_up == pytest.approx(10 / 6)
    assert taco.bound == pytest.approx(1 / (0.1 + 0.9 / 2))
    assert rows[0].busy == pytest.approx(8.4e6 * 8 / 10e6 / 10.0)


def test_a_pipelines_bubble_is_no_communication():
    assert throughput_report.bubble("tp4") == 0.0
    assert throughput_report.bubble("dp2,pp2,tp2") == 1 / 2
    rows = [row("bf16", 10.0, 8.0, "pp2,tp2"), row("alone", 4.0, 0.0, "pp2,tp2")]
    assert throughput_report.compare(rows)[0].exposed == pytest.approx(0.4)


def test_notices_of_the_transport_are_those_of_the_baseline():
    """0.05 MB with messages of any size, more than 1 % of int4's; the baseline's own count in full."""
    rows = [
        dataclasses.replace(row(name, 1.0, size + 5e4), planned=size) for name, size in (("bf16", 8e6), ("int4", 2e6))
    ]
    assert throughput.unexplained(rows[0], rows) == pytest.approx(5e4 / 8e6)
    assert throughput.unexplained(rows[1], rows) == 0
    assert throughput.unexplained(rows[1], rows[1:]) == pytest.approx(0.025)
    more = dataclasses.replace(rows[1], payload=2e6 + 8e4)
    assert throughput.unexplained(more, [rows[0], more]) == pytest.approx(3e4 / 2e6)
    assert throughput.TOLERANCE < 3e4 / 2e6
    # A format of a whole byte is held to its plan as it is.
    int8 = dataclasses.replace(rows[1], compression="int8")
    assert throughput.unexplained(int8, [rows[0], int8]) == pytest.approx(0.025)


def test_the_report_has_every_comparison_and_the_last_of_two_rows(tmp_path):
    rows = [row("bf16", 9.0, 8e6), row("bf16", 10.0, 8e6), row("taco", 6.0, 4e6), row("alone", 1.0, 0.0)]
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(vars(r)) + "\n" for r in rows))
    read = throughput_report.read_rows(file)
    throughput_report.write_report(read, tmp_path)
    with (tmp_path / "throughput.csv").open() as lines:
        written = list(csv.DictReader(lines))
    assert [(r["compression"], float(r["speed_up"])) for r in written] == [("bf16", 1.0), ("taco", 10 / 6)]
    assert (tmp_path / "throughput.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--meshes", "tp3"], "tp3: the model has 2 layers and 8 heads; tp 2, 4 or 8"),
        (["--rates", "fast"], "got 'fast'"),
        (["--compressions", "bf16", "tako"], "got tako"),
        (["--compressions", "taco"], "--compressions needs bf16"),
        (["--rounds", "0"], "--rounds must be 1 or more, got 0"),
    ],
)
def test_a_mistake_is_one_line(argv, message, tmp_path, capsys):
    assert throughput.main([*argv, f"--out={tmp_path / 'out'}"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.network
def test_two_hosts_train_faster_over_a_slow_link(tmp_path, capsys):
    if reason := netns.unsupported_reason():
        pytest.skip(reason)
    argv = ["--meshes", "tp2", "--rates", "40mbit", "--compressions", "bf16", "taco", "--rounds", "3"]
    assert throughput.main([*argv, f"--out={tmp_path}"]) == 0
    base, taco = throughput_report.compare(throughput_report.read_rows(tmp_path / "results.jsonl"))
    for compared in (base, taco):
        assert compared.row.payload == pytest.approx(compared.row.planned, rel=0.01)
    assert base.row.payload / taco.row.payload > 1.9
    assert base.exposed >= 0.5 and taco.speed_up > 1.3
    capsys.readouterr()
    # What is measured is not measured again.
    assert throughput.main([*argv, f"--out={tmp_path}"]) == 0
    assert "compiling" not in capsys.readouterr().err
