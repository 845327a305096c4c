"""Check the kernels on this machine's GPU in six minutes: the contract suite with the real kernels, then the times.

One JSON file holds what was found: the device and its driver, versions, the outcome of the suite for each
implementation, and the report of `experiments.kernels`, each with its seconds. A part that runs out of time leaves
what it had.

python -m experiments.gpu_check --json FILE
"""

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from experiments import targets
from experiments.kernel_programs import Target, find_target, programs, real_gpu

_ROOT = Path(__file__).parent.parent
_SUITE = ("tests/test_contract.py", "tests/test_contract_values.py")
_MARKS = "not slow and not gpu_aot and not network"
_OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b")
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "numpy", "ml_dtypes")


@dataclass(frozen=True)
class Options:
    """Check the kernels on this machine's GPU."""

    json: Annotated[Path, tyro.conf.arg(help="the report")]
    suite_seconds: Annotated[int, tyro.conf.arg(help="the contract suite is stopped after so long")] = 190
    kernel_seconds: Annotated[int, tyro.conf.arg(help="and the times after so long")] = 150
    sizes_mib: Annotated[tuple[int, ...], tyro.conf.arg(help="of the bf16 tensor, to time")] = (4, 32, 256)


def main(argv: list[str] | None = None) -> int:
    """Write the report; returns 0 if the suite passed and everything was measured, 1 if not, 2 without a GPU."""
    options = tyro.cli(Options, args=argv)
    # The processes that follow need the memory that this one would take.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if reason := _missing(options):
        print(f"python -m experiments.gpu_check: error: {reason}", file=sys.stderr)
        return 2
    target = find_target("auto")
    report: dict[str, Any] = {"device": target.label, "driver": driver(), "versions": versions()}
    print(f"{target.label}, driver {report['driver']}, jax {jax.__version__}", flush=True)
    parts = {"contract": lambda: contract_suite(target, options), "kernels": lambda: kernel_times(target, options)}
    for name, part in parts.items():
        start = time.perf_counter()
        report[name] = part()
        report[name]["seconds"] = round(time.perf_counter() - start, 1)
        print(f"{name}: {_outcome(report[name])} after {report[name]['seconds']} s", flush=True)
        # After each part, so that a machine that goes away leaves the parts before.
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(report[name]["passed"] for name in parts) else 1


def implementations(target: Target) -> list[str]:
    """Return the kernels to check: those that serve `taco` there, `triton_sm80` only in place of `triton`."""
    names = {program.implementation for program in programs(target, ("taco",))[0]} - {"xla"}
    return sorted(names - {"triton_sm80"} if "triton" in names else names)


def contract_suite(target: Target, options: Options) -> dict[str, Any]:
    """Run the contract suite on the device with the kernels that serve it there.

    Returns:
        {"passed", "implementations": {name: {outcome: tests}}, "failures": [test], "finished", "tail"}. It passed if
        it ran to its end without a failure and each implementation has tests that passed.
    """
    wanted = implementations(target)
    files = [file for file in _SUITE if (_ROOT / file).exists()]
    if not files:
        return {"passed": False, "tail": [f"there is no {_ROOT / _SUITE[0]}: run it from a checkout"]}
    workers = str(min(8, os.cpu_count() or 1))
    # Warnings of a GPU's own, as that Pallas' Triton backend is deprecated, are no failures here.
    command = [sys.executable, "-m", "pytest", "-v", "-W", "default", "-n", workers, "--dist", "load", "-m", _MARKS]
    if jax.device_count() < 4:
        command += ["-k", "not collectives"]
    environment = {"TACO_CONTRACT_IMPLEMENTATIONS": ",".join(wanted), "JAX_PLATFORMS": ""}
    lines, code = _run([*command, *files], environment, options.suite_seconds)
    counts, failures = outcomes(lines)
    complete = all(counts.get(name, {}).get("PASSED") for name in wanted)
    return {
        "passed": bool(wanted) and complete and code == 0,
        "wanted": wanted,
        "implementations": counts,
        "failures": failures,
        "finished": code is not None,
        "tail": lines[-40:] if code != 0 else [],
    }


def kernel_times(target: Target, options: Options) -> dict[str, Any]:
    """Count and time the kernels; returns {"passed", "finished", "report", "tail"}."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.json"
        sizes = [str(size) for size in options.sizes_mib]
        # What is counted is also timed and compiled once.
        command = [sys.executable, "-m", "experiments.kernels", f"--json={file}", f"--mib={sizes[-1]}", "--time"]
        command += ["--implementations", *implementations(target), "--sizes-mib", *sizes]
        lines, code = _run(command, {}, options.kernel_seconds)
        report = json.loads(file.read_text()) if file.exists() else {}
    print("\n".join(lines), flush=True)
    tail = lines[-40:] if code != 0 else []
    return {"passed": code == 0, "finished": code is not None, "report": report, "tail": tail}


def outcomes(lines: list[str]) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Return {implementation: {outcome: tests}} and the tests that failed, from what `pytest -v` prints.

    A test names its implementation first in its brackets; the others count as "".
    """
    counts: dict[str, Counter[str]] = {}
    failures = []
    for line in lines:
        # The summary at the end repeats the failures, without the percentage.
        test, outcome = re.search(r"\S+::\S+", line), _OUTCOME.search(line)
        if not test or not outcome or not re.search(r"\[\s*\d+%\]", line):
            continue
        named = re.search(r"\[([a-z]\w*)", test[0])
        counts.setdefault(named[1] if named else "", Counter())[outcome[1]] += 1
        if outcome[1] in ("FAILED", "ERROR"):
            failures.append(test[0])
    return {name: dict(count) for name, count in counts.items()}, failures


def driver() -> str:
    """Return what nvidia-smi says of the driver, "unknown" without it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    command = [tool, "--query-gpu=driver_version,memory.total,clocks.max.sm,clocks.max.mem", "--format=csv,noheader"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return run.stdout.strip().replace("\n", "; ") or "unknown"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide what the kernels become."""
    found = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _outcome(part: dict[str, Any]) -> str:
    if part.get("finished") is False:
        return "stopped by its limit"
    return "passed" if part["passed"] else "FAILED"


def _missing(options: Options) -> str | None:
    if not options.json.parent.is_dir():
        return f"cannot write {options.json}: there is no folder {options.json.parent}"
    if real_gpu() is None:
        described = "" if targets.missing_compiler() else "; python -m experiments.kernels compiles for one without it"
        return f"this machine has no GPU that JAX can use{described}"
    return None


def _run(command: list[str], environment: dict[str, str], seconds: int) -> tuple[list[str], int | None]:
    """Run a command in the project's folder; returns its lines and its exit code, None if it was stopped."""
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    inherited = {**os.environ, "PYTHONPATH": path, **environment}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=_ROOT, env=inherited, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            # pytest's workers too.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
        output.seek(0)
        return output.read().splitlines(), code


if __name__ == "__main__":
    raise SystemExit(main())
