"""FLOPs of a training step, and what fraction of the devices' peak it uses.

The count is that of PaLM (arXiv 2204.02311, appendix B): the matrix products of one forward and one backward pass. What
is computed again (remat, pipeline bubbles) and what is no matrix product of the model (norms, softmax, codecs, the
optimizer) takes time but is no work, so recomputing does not raise the MFU.
"""

import logging
from dataclasses import dataclass

import jax

from experiments.config import TrainConfig
from taco_jax.models.config import ModelConfig

_log = logging.getLogger("experiments")

PEAK_FLOPS = {
    "NVIDIA A100": 312e12,  # NVIDIA A100 data sheet
    "NVIDIA H100": 989e12,  # NVIDIA H100 data sheet, SXM; its figures are with sparsity, twice the dense ones
    "NVIDIA H100 PCIe": 756e12,  # NVIDIA H100 PCIe data sheet
    "NVIDIA H100 NVL": 835e12,  # NVIDIA H100 data sheet
    "NVIDIA H200": 989e12,  # NVIDIA H200 data sheet, SXM
    "NVIDIA H200 NVL": 835e12,  # NVIDIA H200 data sheet
    "NVIDIA B200": 2250e12,  # NVIDIA HGX B200 data sheet: 36e15 with sparsity for 8 GPUs
    "TPU v4": 275e12,  # this and the following: Google Cloud, "TPU architecture", per chip
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
}
"""Dense bf16 FLOP/s of one device by the beginning of `jax.Device.device_kind` (of a TPU: all of it)."""


def peak_flops(device_kind: str) -> float | None:
    """Return the dense bf16 FLOP/s of a device as JAX names it, None if it is not known."""
    # A slice of a GPU (MIG) is called like the whole of it; "TPU v4 lite" is another chip than "TPU v4".
    if device_kind in PEAK_FLOPS or "MIG" in device_kind or not device_kind.startswith("NVIDIA"):
        return PEAK_FLOPS.get(device_kind)
    known = [name for name in PEAK_FLOPS if device_kind.startswith((f"{name} ", f"{name}-"))]
    return PEAK_FLOPS[max(known, key=len)] if known else None


def training_flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """Return the FLOPs that one token costs in training: 6 P + 12 L S N D.

    P = L (H D (2 N + 2 K) + m H F) + H V are the parameters that stand in a matrix product, m = 2 for a plain MLP and 3
    for SwiGLU: a multiplication and an addition forward, twice that backward. The attention multiplies S x D per head
    twice, for scores and for values; the half that the causal mask discards is counted, as PaLM does. V is the
    tokenizer's, without padding.

    Args:
        model: L layers, H hidden, N query and K key heads of D, F intermediate, V vocabulary.
        sequence_length: S, tokens that attend to each other.
    """
    c = model.resolved()
    projections = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    matrices = 3 if c.family == "qwen" else 2
    layer = projections + matrices * c.hidden_size * c.intermediate_size
    in_products = c.num_layers * layer + c.hidden_size * c.vocab_size
    return 6 * in_products + 12 * c.num_layers * sequence_length * c.num_heads * c.head_dim


@dataclass(frozen=True)
class Throughput:
    """Turns the time of a step into FLOP/s per device.

    Attributes:
        flops_per_step: of the whole mesh.
        num_devices: devices of the mesh.
        peak: FLOP/s of one device, None if unknown.
    """

    flops_per_step: float
    num_devices: int
    peak: float | None = None

    def metrics(self, seconds: float) -> dict[str, float]:
        """Return {"tflops_per_device"} and, with a peak, {"mfu"} in 0..1 of a step that took `seconds`."""
        achieved = self.flops_per_step / seconds / self.num_devices
        return {"tflops_per_device": achieved / 1e12} | ({"mfu": achieved / self.peak} if self.peak else {})


def throughput_of(config: TrainConfig, model: ModelConfig, mesh: jax.sharding.Mesh) -> Throughput:
    """Return the throughput of a run; say so where no peak is known of an accelerator."""
    tokens = config.data.batch_size * config.data.sequence_length
    device = mesh.devices.flat[0]
    peak = config.log.peak_flops or peak_flops(device.device_kind)
    if not peak and device.platform != "cpu":
        _log.info("MFU n/a: no peak is known of %s; --peak-flops gives it", device.device_kind)
    return Throughput(tokens * training_flops_per_token(model, config.data.sequence_length), mesh.size, peak)


def format_flops(tflops: float) -> str:
    """Return TFLOP/s with three digits and the unit that suits them: "85.2 MFLOP/s", "413 TFLOP/s"."""
    for prefix, scale in (("T", 1.0), ("G", 1e3), ("M", 1e6)):
        if tflops * scale >= 0.9995:
            return f"{_three_digits(tflops * scale)} {prefix}FLOP/s"
    return f"{tflops * 1e9:.3g} kFLOP/s"


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"
