"""What a compiled kernel costs: its PTX instructions, and registers and spills as ptxas reports them."""

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_ENTRY = re.compile(r"\.entry (\w+)")
_TARGET = re.compile(r"\.target\s+(sm_\w+)")
# Inline assembly may put several on one line.
_INSTRUCTION = re.compile(r"(?:^\s+|;\s*)(?:@!?%\w+\s+)?([a-z][\w.:]*)\s[^;\n]*(?=;)", re.MULTILINE)
_LIMITS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class Kernel:
    """One kernel; `instructions` counts opcodes with their modifiers, as written, e.g. `ld.global.v4.b32`."""

    name: str
    arch: str
    text: str
    instructions: Counter
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int

    def count(self, pattern: str) -> int:
        """Return how many instructions have an opcode that matches the regular expression from its start."""
        return sum(n for opcode, n in self.instructions.items() if re.match(pattern, opcode))


def find_ptxas() -> str | None:
    """Return the assembler of the wheel nvidia-cuda-nvcc, or of an installed CUDA; None if there is none."""
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(path) / "cu13" / "bin" / "ptxas" for path in (spec.submodule_search_locations or [])] if spec else []
    found = [*(path for path in wheels if path.exists()), *filter(None, [shutil.which("ptxas")])]
    return str(found[0]) if found else None


def read_kernels(folder: Path, prefix: str) -> list[Kernel]:
    """Return the kernels whose name begins with `prefix` from the PTX that XLA dumped into a folder."""
    return [kernel for path in sorted(folder.glob("*.ptx")) for kernel in read_file(path, prefix)]


def read_file(path: Path, prefix: str) -> list[Kernel]:
    """Return the kernel of a file if its name begins with `prefix`; XLA writes one into a file."""
    text = path.read_text()
    entry = _ENTRY.search(text)
    return [_assemble(text)] if entry and entry[1].startswith(prefix) else []


def _assemble(text: str) -> Kernel:
    arch = _TARGET.search(text)[1]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(text)
        command = [find_ptxas(), "-v", f"--gpu-name={arch}", str(source), "-o", f"{folder}/kernel.cubin"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stack, stores, loads = (int(value) for value in _LIMITS.search(report).groups())
    return Kernel(
        name=_ENTRY.search(text)[1],
        arch=arch,
        text=text,
        instructions=Counter(_INSTRUCTION.findall(text)),
        registers=int(_REGISTERS.search(report)[1]),
        stack=stack,
        spill_stores=stores,
        spill_loads=loads,
    )
