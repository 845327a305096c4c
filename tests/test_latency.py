"""Inference over shaped links: what the figures are made to say, the command around them, and two hosts."""

import csv
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from experiments import latency, latency_report, latency_worker, netns
from experiments.communication import CommunicationMismatch
from experiments.latency_report import Row
from taco_jax.sharding.mesh import make_mesh, parse_mesh


def row(compression: str, size: int, turns: list[float], exact: bool = False, rate: str = "50mbit") -> Row:
    middle = sorted(turns)[len(turns) // 2]
    payload = 1e5 * size / {"none": 1, "bf16": 2}.get(compression, 4)
    return Row(
        mesh="tp2", rate=rate, compression=compression, size=size, message=1024 * size, seconds=middle,
        fastest=min(turns), slowest=max(turns), turns=turns, payload=payload * 1.02, planned=payload, limit=4096,
        exact=exact or compression == "none", snr_db=30.0, same_tokens=12 if size == 1 else None,
    )  # fmt: skip


def test_load_that_comes_and_goes_does_not_move_the_speed_up():
    """Turns that are twice as slow for both, and one in which another program slows one of the two down."""
    none, taco = row("none", 4, [2.0, 4.0, 2.0, 4.0, 4.0]), row("taco", 4, [1.0, 2.0, 1.0, 2.0, 2.0])
    assert latency_report.speed_up(taco, none) == latency_report.sure_speed_up(taco, none) == 2.0
    disturbed = row("taco", 4, [1.0, 2.0, 1.0, 2.0, 40.0])
    assert latency_report.speed_up(disturbed, none) == 2.0
    assert latency_report.sure_speed_up(disturbed, none) == pytest.approx(0.1)


def sweep(*seconds: tuple[int, float, float, bool]) -> list[Row]:
    """Return the rows of (size, seconds of none, seconds of taco, left exact by the limit)."""
    pairs = [(row("none", n, [a] * 5), row("taco", n, [b] * 5, exact)) for n, a, b, exact in seconds]
    return [r for pair in pairs for r in pair]


def test_compression_pays_from_where_no_larger_message_is_slower():
    rows = sweep((1, 1.0, 0.5, True), (4, 1.0, 2.0, False), (16, 3.0, 2.0, False), (64, 8.0, 4.0, False))
    assert latency_report.pays_from(rows, "taco") == 16 * 1024
    assert latency_report.pays_from(rows[:4], "taco") is None
    # Against another baseline only what was measured with it counts.
    assert latency_report.pays_from(rows, "taco", "bf16") is None


def test_a_limit_costs_where_it_leaves_exact_what_is_faster_compressed_and_the_reverse():
    too_high = sweep((1, 3.0, 2.0, True), (4, 1.0, 0.9, False))
    assert latency_report.worst_choice(too_high, "taco") == (1.5, 1024)
    too_low = sweep((1, 1.0, 2.0, True), (4, 1.0, 1.25, False), (16, 3.0, 2.0, False))
    assert latency_report.worst_choice(too_low, "taco") == (1.25, 4096)
    right = sweep((1, 1.0, 2.0, True), (16, 3.0, 2.0, False))
    assert latency_report.worst_choice(right, "taco") == (1.0, 0)


def printed(table) -> str:
    text = io.StringIO()
    Console(file=text, width=120).print(table)
    return text.getvalue()


def words(table) -> str:
    return " ".join(printed(table).split())


def test_the_tables_have_the_figures():
    rows = [row("none", 1, [0.02] * 5), row("bf16", 1, [0.05] * 5, True), row("taco", 1, [0.04] * 5, True)]
    rows += [row("none", 64, [0.8] * 5), row("bf16", 64, [0.45] * 5), row("taco", 64, [0.2, 0.2, 0.2, 0.2, 0.3])]
    times = printed(latency_report.times_table("tp2", rows)).splitlines()
    token, prompt = (next(line.split() for line in times if f" {text}" in line) for text in ("1 KiB*", "64 KiB "))
    assert token == ["50mbit", "1", "1", "KiB*", "20.0", "(20.0-20.0)", "50.0", "(50.0-50.0)", "0.40x", "40.0",
                     "(40.0-40.0)", "0.50x"]  # fmt: skip
    assert prompt[4:] == ["800", "(800-800)", "450", "(450-450)", "1.78x", "200", "(200-300)", "4.00x"]
    sent = words(latency_report.bytes_table("tp2", rows))
    assert "6,400,000 (+2.0%)" in sent and "1,600,000 (+2.0%)" in sent
    assert "taco 30 dB, 12 of 17 tokens" in sent
    limits = [line.split() for line in printed(latency_report.limits_table("tp2", rows)).splitlines()]
    assert ["50mbit", "bf16", "64", "KiB", "-", "nothing", "sure"] in limits
    assert ["50mbit", "taco", "64", "KiB", "1", "KiB", "nothing", "sure"] in limits


class Hosts:
    """Stands for `Workers`: two processes whose calls take a time, and send bytes, by the size and the compression."""

    started: list[list[str]] = []
    tokens = staticmethod(lambda host, turn: [5] * 17)
    bytes_more = 1.0

    def __init__(self, module, mesh, arguments, folder):
        self.mesh, self.hosts, self.links = mesh, 2, SimpleNamespace(set_rate=lambda rate: None)
        self._sizes = [int(n) for n in arguments[0].split(",")]
        self._turn = 0
        Hosts.started.append(list(arguments))
        models = {
            name: {
                "planned": {str(size): self._bytes(name, size) for size in self._sizes},
                "exact": [size for size in self._sizes if name == "none" or 1024 * size < int(arguments[1])],
                "snr_db": float("inf") if name == "none" else 30.0,
            }
            for name in arguments[2:]
        }
        self.ready = [{"bytes_per_position": 1024, "models": models}] * 2

    def _bytes(self, name, size):
        return 2e5 * size / (1 if name == "none" else 4)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ask(self, run, size, calls):
        self._turn += 1
        # The second host is the slower one.
        return [
            {
                "seconds": [(1 + host) * (0.01 + size * (0.004 if run == "none" else 0.001))] * calls,
                "payload": self._bytes(run, size) * calls * self.bytes_more,
                "tokens": self.tokens(host, self._turn),
            }
            for host in range(2)
        ]


@pytest.fixture
def hosts(monkeypatch):
    monkeypatch.setattr(latency, "Workers", Hosts)
    monkeypatch.setattr(Hosts, "started", [])
    return Hosts


ARGV = ["--meshes", "tp2", "--rates", "50mbit", "none", "--compressions", "none", "taco", "--prompts", "16"]


def test_the_command_writes_what_the_hosts_say_and_measures_nothing_twice(hosts, tmp_path, capsys):
    argv = [*ARGV, f"--out={tmp_path / 'out'}", f"--csv={tmp_path / 'a.csv'}", f"--json={tmp_path / 'a.json'}"]
    assert latency.main(argv) == 0
    assert hosts.started == [["1,16", "4096", "none", "taco"]]
    rows = [Row(**fields) for fields in json.loads((tmp_path / "a.json").read_text())]
    assert [r.key for r in rows] == [
        ("tp2", rate, name, size) for rate in ("50mbit", "none") for size in (1, 16) for name in ("none", "taco")
    ]
    by_key = {r.key[1:]: r for r in rows}
    taco = by_key["50mbit", "taco", 16]
    assert (taco.seconds, taco.message, taco.exact) == (pytest.approx(0.052), 16 * 1024, False)
    assert taco.payload == taco.planned == 8e5 and len(taco.turns) == 5
    token = by_key["none", "taco", 1]
    assert (token.exact, token.same_tokens, token.snr_db) == (True, 17, 30.0)
    with (tmp_path / "a.csv").open() as lines:
        ratios = {(r["rate"], r["compression"], int(r["size"])): float(r["speed_up"]) for r in csv.DictReader(lines)}
    assert ratios["50mbit", "taco", 16] == pytest.approx((0.01 + 0.064) / (0.01 + 0.016))
    assert (tmp_path / "out" / "latency.csv").read_text() == (tmp_path / "a.csv").read_text()
    assert (tmp_path / "out" / "latency.png").stat().st_size > 1000
    assert "pays from" in capsys.readouterr().out
    # One line fewer: only that size of that link is measured again, with all compressions.
    file = tmp_path / "out" / "results.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    assert latency.main(argv) == 0
    assert hosts.started[1:] == [["16", "4096", "none", "taco"]]
    assert latency.main(argv) == 0
    assert len(hosts.started) == 2
    # Which messages another limit leaves exact, only the processes know.
    assert latency.main([*argv, "--min-bytes=0"]) == 0
    assert hosts.started[2:] == [["1,16", "0", "none", "taco"]]


def test_tokens_that_change_between_turns_or_hosts_end_the_command(hosts, tmp_path, monkeypatch, capsys):
    for tokens in (lambda host, turn: [5] * 16 + [turn // 6], lambda host, turn: [5] * 16 + [host]):
        monkeypatch.setattr(hosts, "tokens", staticmethod(tokens))
        assert latency.main([*ARGV, f"--out={tmp_path}"]) == 1
        assert "continued the prompt with" in capsys.readouterr().err
    assert not (tmp_path / "results.jsonl").exists()


def test_bytes_that_nobody_planned_are_an_error(hosts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hosts, "bytes_more", 1.05)
    assert latency.main([*ARGV, f"--out={tmp_path}"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert (
        "tp2 over 50mbit, none, 16 positions: 3,360,000 bytes per call and host were sent, 3,200,000 were planned"
        in (lines)
    )
    # What gloo says beside messages of a token is more than they are.
    assert not any("1 positions" in line for line in lines)


def test_quick_fills_in_what_is_not_asked_for():
    quick = latency._filled(latency.Options(quick=True, rates=("1gbit",)))
    assert (quick.meshes, quick.rates, quick.prompts) == (("tp2",), ("1gbit",), (16, 256))
    assert latency._filled(latency.Options()).meshes == ("tp2", "tp4")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--meshes", "tp3"], "--meshes: a host per device and 8 heads: tp2, tp4 or tp8, got tp3"),
        (["--meshes", "dp2,tp2"], "tp2, tp4 or tp8, got dp2,tp2"),
        (["--rates", "fast"], "got 'fast'"),
        (["--compressions", "none", "tako"], "got tako"),
        (["--compressions", "taco"], "--compressions needs none"),
        (["--prompts", "16", "1"], "--prompts must be from 2 to 1024 tokens, got 1"),
        (["--prompts", "many"], "many"),
        (["--rounds", "0"], "--rounds must be 1 or more, got 0"),
        (["--min-bytes=-1"], "--min-bytes must be 0 or more, got -1"),
        (["--csv", "no/such/folder/a.csv"], "cannot write no/such/folder/a.csv"),
        (["--round", "3"], "there is no option --round; did you mean --rounds?"),
    ],
)
def test_a_mistake_is_one_line(argv, message, tmp_path, capsys):
    assert latency.main([*argv, f"--out={tmp_path / 'out'}"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_a_limit_sends_is_what_none_or_the_compression_sends(quickly_compiled):
    mesh = make_mesh(parse_mesh("tp2"))

    def generator(name: str, limit: int):
        return latency_worker.new_generator(latency_worker.configuration("tp2", name, limit), mesh)

    exact, compressed, limited = generator("none", 0), generator("int8", 0), generator("int8", 4096)
    # 256 values of 4 bytes: the messages of 4 positions are as large as the limit, which means smaller ones.
    found = {size: latency_worker.exact_by(limited, exact, compressed, size) for size in (1, 3, 4, 16)}
    assert found == {1: True, 3: True, 4: False, 16: False}
    other = generator("bf16", 0)
    with pytest.raises(CommunicationMismatch, match="of 4 positions"):
        latency_worker.exact_by(other, exact, compressed, 4)


@pytest.mark.network
def test_two_hosts_read_a_long_prompt_faster_compressed_over_a_slow_link(tmp_path):
    if reason := netns.unsupported_reason():
        pytest.skip(reason)
    argv = ["--meshes", "tp2", "--rates", "50mbit", "--compressions", "none", "int8", "--prompts", "256"]
    assert latency.main([*argv, "--rounds=3", f"--out={tmp_path}"]) == 0
    rows = {(r.compression, r.size): r for r in latency_report.read_rows(tmp_path / "results.jsonl")}
    for name in ("none", "int8"):
        prompt = rows[name, 256]
        assert prompt.payload == pytest.approx(prompt.planned, rel=0.03)
        assert prompt.planned > 100 * rows[name, 1].planned
    # Five sums of 256 x 256 values: each host sends them once as float32, or as bytes and a bf16 scale for every 128.
    assert rows["none", 256].planned == pytest.approx(5 * 2**18, rel=1e-3)
    assert rows["int8", 256].planned == pytest.approx(5 * 2**16 * (1 + 2 / 128), rel=1e-3)
    assert latency_report.speed_up(rows["int8", 256], rows["none", 256]) > 1.3
    assert rows["none", 1].exact and rows["int8", 1].exact and not rows["int8", 256].exact
    assert np.isinf(rows["none", 1].snr_db) and 25 < rows["int8", 1].snr_db < 60
