"""Registers and shared memory of every Triton kernel: what they are, and `resources.json`, what they may be.

    PYTHONPATH=tests:. python -m gpu_aot.resources            # print how the kernels differ from the table
    PYTHONPATH=tests:. python -m gpu_aot.resources --write    # make them the table

ptxas counts the registers; Triton's shared memory is asked for at the launch, so that XLA's list of launches has it.
"""

import argparse
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gpu_aot import kernels, process, ptx

TABLE = Path(__file__).with_name("resources.json")
SERVED = {
    "h200": tuple(kernels.CODECS),
    "h100": kernels.PRESETS,
    "b200": kernels.PRESETS,
    "a100": (*kernels.PRESETS, "e5m2_adaptive", "e5m2_block"),
}
"""What is compiled for each GPU: every codec for one, the presets and what differs from it for the others."""
_LAUNCH = re.compile(r"kCustomKernel .*\] (taco_\w+) grid: .* shared_memory: (\d+) bytes")


@dataclass(frozen=True)
class Cost:
    """What one program of a kernel takes from its multiprocessor."""

    registers: int
    """Per thread."""
    shared: int
    """Bytes per program."""

    def exceeds(self, other: "Cost") -> bool:
        return self.registers > other.registers or self.shared > other.shared


class Compiled(NamedTuple):
    """One kernel, with its cost."""

    kernel: ptx.Kernel
    cost: Cost


def compile_all(gpu: str, folder: Path) -> dict[tuple[str, str], Compiled]:
    """Return {(codec, operation): compiled} for one GPU, compiled in a process of its own, which dumps to `folder`."""
    # A program that comes from a cache dumps nothing.
    environment = {"JAX_ENABLE_COMPILATION_CACHE": "false", **process.dumping_ptx(folder)}
    process.run("gpu_aot.kernels", gpu, *SERVED[gpu], timeout=600, **environment)
    names = [(codec, operation) for codec in SERVED[gpu] for operation in kernels.OPERATIONS]
    return {name: _read(folder, "__".join(name)) for name in names}


def _read(folder: Path, program: str) -> Compiled:
    files = folder.glob(f"*.jit_{program}.*ptx")
    (kernel,) = (kernel for file in files for kernel in ptx.read_file(file, "taco_"))
    (launches,) = folder.glob(f"*.jit_{program}.thunk_sequence.txt")
    ((_, shared),) = _LAUNCH.findall(launches.read_text())
    return Compiled(kernel, Cost(kernel.registers, int(shared)))


def read_table() -> dict[str, dict[tuple[str, str], Cost]]:
    """Return {gpu: {(codec, operation): the cost that may not be exceeded}}."""
    return {
        gpu: {(codec, op): Cost(*cost) for codec, costs in codecs.items() for op, cost in costs.items()}
        for gpu, codecs in json.loads(TABLE.read_text()).items()
    }


def write_table(table: dict[str, dict[tuple[str, str], Cost]]) -> None:
    """Write {gpu: {codec: {operation: [registers, bytes of shared memory]}}}, one line for a codec."""
    gpus = []
    for gpu, costs in table.items():
        codecs: dict[str, dict[str, list[int]]] = {}
        for (codec, op), cost in costs.items():
            codecs.setdefault(codec, {})[op] = [cost.registers, cost.shared]
        lines = ",\n".join(f"    {json.dumps(codec)}: {json.dumps(costs)}" for codec, costs in codecs.items())
        gpus.append(f"  {json.dumps(gpu)}: {{\n{lines}\n  }}")
    TABLE.write_text("{\n" + ",\n".join(gpus) + "\n}\n")


def main() -> None:
    """Print or write what the kernels cost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="make it the table")
    write = parser.parse_args().write
    table = read_table() if TABLE.exists() else {}
    for gpu in SERVED:
        with tempfile.TemporaryDirectory() as folder:
            found = {name: compiled.cost for name, compiled in compile_all(gpu, Path(folder)).items()}
        for name, cost in found.items():
            before = table.get(gpu, {}).get(name)
            if cost != before:
                print(gpu, *name, before, "->", cost)
        table[gpu] = found
    if write:
        write_table(table)


if __name__ == "__main__":
    main()
