"""Compile the training step of a small GPT for eight GPUs: `python -m gpu_aot.train_step GPU FOLDER VARIANT...`.

A variant is COMPRESSION-CHUNKS-IMPLEMENTATION-SETTINGS, settings being `trainer` or `xla`. Each leaves VARIANT.hlo and
VARIANT.json (memory and the plan's messages); `two_hop-IMPLEMENTATION` leaves the all-reduce alone. In a process of its
own, because a failure in LLVM or ptxas ends the process.
"""

import json
import sys
import warnings
from pathlib import Path

from experiments import step, targets
from experiments.compiler_options import gpu_options
from experiments.overlap import AXES, step_config
from experiments.planned import planned_collectives
from gpu_aot.two_hop import compile_psum


def compile_step(gpu: str, variant: str, folder: Path) -> None:
    compression, chunks, implementation, settings = variant.split("-")
    mesh = targets.mesh(gpu, AXES)
    program = step.build(step_config(compression, int(chunks), implementation), mesh)
    compiled = program.compiled if settings == "trainer" else program.compile({})
    assert gpu_options(mesh.devices.flat[0].platform, "")
    plan = [(c.op, c.site, c.direction, c.payload_bytes, int(c.count)) for c in planned_collectives(program.jaxpr, AXES)
            if c.compressed]  # fmt: skip
    report = {"temporary": compiled.memory_analysis().temp_size_in_bytes, "plan": plan}
    (folder / f"{variant}.hlo").write_text(compiled.as_text())
    (folder / f"{variant}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)
    for name in sys.argv[3:]:
        if name.startswith("two_hop-"):
            text = compile_psum(sys.argv[1], name.removeprefix("two_hop-"))
            Path(sys.argv[2], f"{name}.hlo").write_text(text)
        else:
            compile_step(sys.argv[1], name, Path(sys.argv[2]))
