"""The page of `python -m experiments.plot`, as a browser shows it."""

import builtins
import html.parser
import json
import math
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from experiments.plot import main
from experiments.rundata import format_bytes, read_runs

pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")

SITES = {"attention": ("forward", "backward"), "mlp": ("forward", "backward"), "embedding": ("forward",)}


def write_run(folder, steps: int, *, compressed: bool, sites: bool = False, loss: float = 2.5) -> None:
    """Write a run folder as the trainer does; step 4 is not finite, step 1 is slow."""
    folder.mkdir()
    rows = []
    for step in range(1, steps + 1):
        row = {"step": step, "loss": loss + 3 / step, "grad_norm": 1 + 9 / step, "lr": 1e-3, "step_ms": 40.0 + step % 2}
        row |= {"tokens_per_s": 6400.0, "tflops_per_device": 6e-4, "saturation": 0.0 if compressed else None}
        row |= {"snr_forward": 29.0, "snr_backward": 28.0} if compressed else {"snr_forward": None}
        row |= {"val_loss": loss + 0.25} if step % 5 == 0 else {}
        if step == 1:
            row |= {"first_step": 1.0, "step_ms": 9000.0}
        if step == 4:
            row |= {"loss": None, "grad_norm": None}
        for site, directions in SITES.items() if sites else ():
            for direction in directions:
                row |= {f"alpha/{site}/{direction}/{hop}": 2.0 ** (8 - hop) for hop in (1, 2)}
                row |= {f"snr/{site}/{direction}": 29.0, f"saturation/{site}/{direction}": 1e-6}
                row[f"nonfinite/{site}/{direction}"] = float(site == "mlp" and step == 4)
        rows.append(json.dumps(row))
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    config = {"mesh": "dp2,pp1,tp4", "compression": "taco" if compressed else "none"}
    (folder / "config.json").write_text(json.dumps(config))

    def total(sent: int, exact: int) -> dict:
        return {"bytes_per_step": sent, "bf16_bytes_per_step": exact, "ratio": exact / sent if sent else None}

    tp = total(45_800, 90_500) if compressed else total(90_500, 90_500)
    totals = {"axes": {"dp": total(100_000, 50_000), "dp,tp": total(6, 3), "tp": tp}, "all": total(146_000, 140_000)}
    totals["compressed"] = total(45_000, 90_000) if compressed else total(0, 0)
    (folder / "communication.json").write_text(json.dumps({"collectives": [], "totals": totals}))


@pytest.fixture(scope="module")
def page_of_three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "long <!--<script> &", 30, compressed=True, sites=True)
    write_run(folder / "short", 12, compressed=True)
    write_run(folder / "exact", 30, compressed=False, loss=2.4)
    out = folder / "page.html"
    assert main([str(folder / name) for name in ("long <!--<script> &", "short", "exact")] + [f"--out={out}"]) == 0
    return out


class Page(html.parser.HTMLParser):
    """Collects titles of panels, cells of the summary, what would be loaded, and ids."""

    def __init__(self, text: str):
        super().__init__()
        self.titles, self.rows, self.loaded, self.ids, self._path = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.loaded += [attributes[name] for name in ("src", "href") if name in attributes]
        self.ids += [attributes["id"]] if "id" in attributes else []
        self._path.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag):
        while self._path and self._path.pop() != tag:
            pass

    def handle_data(self, data):
        if self._path[-1:] == ["b"]:
            self.titles.append(data)
        elif self._path[-1:] in (["td"], ["th"]):
            self.rows[-1].append(data)


def test_a_page_shows_what_the_runs_hold(page_of_three):
    page = Page(page_of_three.read_text())
    assert page.titles == [
        "Loss", "Validation loss", "Signal-to-noise ratio of messages", "Saturated values", "Gradient norm",
        "Learning rate", "Step time", "Model FLOP/s", "Bytes on the wire",
        *("attention", "embedding", "mlp") * 3, "mlp",
    ]  # fmt: skip
    assert page.rows[1:] == [
        ["long <!--<script> &", "dp2,pp1,tp4", "taco", "30", "2.6000", "2.7500", "29.0 / 28.0", "45.8 kB / 90.5 kB",
         "1.98x", "2.00x", "40", "6,400"],
        ["short", "dp2,pp1,tp4", "taco", "12", "2.7500", "2.7500", "29.0 / 28.0", "45.8 kB / 90.5 kB", "1.98x", "2.00x",
         "40", "6,400"],
        ["exact", "dp2,pp1,tp4", "none", "30", "2.5000", "2.6500", "\N{EN DASH}", "90.5 kB / 90.5 kB", "1.00x",
         "\N{EN DASH}", "40", "6,400"],
    ]  # fmt: skip


def test_a_page_loads_nothing(page_of_three):
    text = page_of_three.read_text()
    page = Page(text)
    assert [target for target in page.loaded if not target.startswith(("#", "data:"))] == []
    assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}  # the names of XML spaces
    assert "@import" not in text and not re.search(r"url\((?!#)", text)


def curve(page, title: str, run: int, label: str) -> dict[int, float]:
    """Return the values that the pointer shows, by step."""
    text = page.read_text()
    data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', text, re.DOTALL).group(1))
    titles = [name for name in Page(text).titles if name != "Bytes on the wire"]
    (found,) = (
        c for c in data["panels"][titles.index(title)]["curves"] if c["run"] == run and c["label"] == label
    )  # fmt: skip
    return dict(zip(found["steps"], found["values"], strict=True))


def test_curves_are_the_recorded_numbers(page_of_three):
    loss = curve(page_of_three, "Loss", 0, "training")
    assert list(loss) == list(range(1, 31)) and loss[4] is None and loss[3] == 3.5
    assert curve(page_of_three, "Validation loss", 1, "validation") == {5: 2.75, 10: 2.75}
    assert curve(page_of_three, "Step time", 1, "step")[1] is None  # the first step is no speed
    assert curve(page_of_three, "Model FLOP/s", 1, "step")[2] == 6e8
    assert curve(page_of_three, "attention", 0, "backward, hop 2")[7] == 6  # log2 of 64


# In a real browser

_DRIVE = """
<script>
document.querySelectorAll(".chip")[1].click();
const target = document.querySelectorAll("figure[data-curves] svg")[0];
const area = target.getBoundingClientRect();
const [left, , right] = data.panels[0].box.map((x) => (x / target.viewBox.baseVal.width) * area.width);
const [first, last] = data.panels[0].limits;
const clientX = area.left + left + ((10 - first) / (last - first)) * (right - left);
target.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY: area.top + 60 }));
document.getElementById("theme").click();
const parts = (name) => [...document.querySelectorAll(name)];
const visible = (run) => parts(".run-" + run).filter((e) => e.getBoundingClientRect().width).length;
document.title = JSON.stringify({
  tip: document.getElementById("tip").innerText,
  visible: [0, 1, 2].map(visible),
  lines: parts(".cursor").filter((e) => e.getAttribute("visibility") === "visible").length,
  colors: new Set([0, 1, 2].map((i) => getComputedStyle(document.querySelector(".run-" + i + " path")).stroke)).size,
  background: getComputedStyle(document.body).backgroundColor,
  text: getComputedStyle(document.querySelector("svg text")).fill,
  overflow: document.documentElement.scrollWidth - innerWidth,
});
</script></body>
"""


@pytest.fixture(scope="module")
def chromium():
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")


def browse(chromium: str, page, profile, *arguments: str) -> tuple[str, list[str]]:
    """Return the document that a page becomes and what its console says."""
    options = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--window-size=1400,1200",
        "--enable-logging=stderr", "--v=0", f"--user-data-dir={profile}",
    ]  # fmt: skip
    done = subprocess.run(
        [chromium, *options, *arguments, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_a_browser_shows_values_hides_runs_and_changes_the_theme(chromium, page_of_three, tmp_path):
    driven = tmp_path / "driven.html"
    driven.write_text(page_of_three.read_text().replace("</body>", _DRIVE))
    document, console = browse(chromium, driven, tmp_path / "profile", "--dump-dom")
    assert console == []
    seen = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", document).group(1)))
    lines = [re.split(r"\t", line) for line in seen["tip"].splitlines() if line]
    assert lines == [
        ["step 10"],
        ["long <!--<script> &", "training", "2.8"],
        ["long <!--<script> &", "validation", "2.75"],
        ["exact", "training", "2.7"],
        ["exact", "validation", "2.65"],
    ]
    assert seen["visible"][0] > 0 and seen["visible"][1] == 0 and seen["visible"][2] > 0
    assert seen["lines"] == 8 + 10  # every panel with curves
    assert seen["colors"] == 3
    assert seen["overflow"] <= 0
    # The click turned the light page dark, and the drawings with it.
    assert max(channels(seen["background"])) < 60 and min(channels(seen["text"])) > 180


def channels(color: str) -> list[int]:
    return [int(value) for value in re.findall(r"\d+", color)[:3]]


def test_an_error_in_the_page_would_be_seen(chromium, page_of_three, tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text(page_of_three.read_text().replace("</body>", "<script>nothing.here()</script></body>"))
    _, console = browse(chromium, broken, tmp_path / "profile", "--dump-dom")
    assert len(console) == 1 and "nothing is not defined" in console[0]


# Mistakes


def failure(capsys, *argv: str) -> str:
    assert main(list(argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def test_a_mistake_is_one_line_and_code_2(tmp_path, capsys):
    write_run(run := tmp_path / "run", 6, compressed=True)
    out = f"--out={tmp_path / 'page.html'}"
    assert "name one or more run folders" in failure(capsys, out)
    assert "metrics.jsonl: No such file" in failure(capsys, str(tmp_path), out)
    assert "is given twice" in failure(capsys, str(run), f"{run}/.", out)
    assert "cannot write /proc/none/x" in failure(capsys, str(run), "--out=/proc/none/x")
    (run / "communication.json").write_text('{"totals": ')
    assert "communication.json is no JSON" in failure(capsys, str(run), out)
    (run / "communication.json").unlink()
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    for bad in ("{", "[1]", '{"step": 3, "loss": "high"}', '{"loss": 3}'):
        metrics.write_text("\n".join([lines[0], bad, lines[1]]))
        assert "metrics.jsonl line 2 is no step" in failure(capsys, str(run), out)
    metrics.write_text("")
    assert "metrics.jsonl holds no step" in failure(capsys, str(run), out)
    metrics.write_bytes(b"\xff\xfe\n")
    assert "it is no text" in failure(capsys, str(run), out)
    assert not (tmp_path / "page.html").exists()


def test_without_matplotlib_is_one_line(tmp_path, capsys, monkeypatch):
    write_run(tmp_path / "run", 6, compressed=True)
    real = builtins.__import__

    def without(name, *arguments):
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return real(name, *arguments)

    monkeypatch.delitem(sys.modules, "experiments.panels", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install matplotlib" in failure(capsys, str(tmp_path / "run"))


def test_a_run_that_is_being_written_can_be_drawn(tmp_path, capsys):
    write_run(run := tmp_path / "run", 3, compressed=True)
    for name in ("config.json", "communication.json"):
        (run / name).unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert main([str(run), f"--out={tmp_path / 'page.html'}"]) == 0
    page = Page((tmp_path / "page.html").read_text())
    assert "Bytes on the wire" not in page.titles and page.rows[1][:2] == ["run", "3"]


def test_one_step_alone_can_be_drawn(tmp_path):
    write_run(run := tmp_path / "run", 1, compressed=False)
    assert main([str(run), f"--out={tmp_path / 'page.html'}"]) == 0


def test_long_runs_are_thinned_without_losing_a_peak(tmp_path):
    from experiments.panels import draw, training_panels

    (run := tmp_path / "run").mkdir()
    values = np.random.default_rng(0).uniform(2, 3, 40_000)
    values[12_345] = 99.0
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {i}, "loss": {v}}}\n' for i, v in enumerate(values, 1)))
    (drawing, *_) = (draw(panel, read_runs([run])) for panel in training_panels()[:1])
    (curve,) = drawing.curves
    assert len(curve["steps"]) <= 1502 and curve["values"][curve["steps"].index(12_346)] == 99.0
    assert max(curve["values"]) == 99.0 and min(curve["values"]) == float(f"{values.min():.5g}")


def test_runs_are_called_so_that_they_differ(tmp_path):
    for name in ("a/run", "b/run"):
        (tmp_path / name).parent.mkdir()
        write_run(tmp_path / name, 2, compressed=True)
    assert [run.name for run in read_runs([tmp_path / "a/run", tmp_path / "b/run"])] == ["a/run", "b/run"]
    (run,) = read_runs([tmp_path / "a/run"])
    assert run.name == "run" and math.isnan(run.last("val_loss"))


def test_medians_leave_out_every_first_step(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": i, "step_ms": ms} | ({"first_step": 1.0} if i in (1, 4) else {})) + "\n"
            for i, ms in enumerate([9000.0, 10.0, 12.0, 8000.0, 14.0], 1)
        )
    )
    assert read_runs([tmp_path])[0].median_speed("step_ms") == 12.0


@pytest.mark.parametrize(("size", "text"), [(6, "6 B"), (45_828, "45.8 kB"), (1.21e6, "1.21 MB"), (2e9, "2 GB")])
def test_bytes_have_three_digits(size, text):
    assert format_bytes(size) == text
