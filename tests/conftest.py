"""Eight emulated devices for every test process, set before JAX starts."""

import os

import jax

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=100",
        "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
    ]
).strip()
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
