"""What happens at a step whose loss or gradient is not finite, which the step itself never applies."""

import logging
import math
from collections.abc import Callable, Mapping

_log = logging.getLogger("experiments")

MAX_CONSECUTIVE = 10
"""Steps in a row that `skip` leaves out before it gives up: from then on nothing will change."""


class Diverged(Exception):
    """A step that was not finite; it has not been applied."""


class NonfiniteGuard:
    """End the run at a step that is not finite, or count it and go on; the same on all ranks, which see the same sums.

    Args:
        policy: `abort` raises at the first one; `skip` counts them and raises after `MAX_CONSECUTIVE` in a row.
        origin: names where the first number that was not finite was seen, given a step's metrics.
        skipped: steps that the run has left out before.
    """

    def __init__(self, policy: str, origin: Callable[[Mapping[str, float]], str], skipped: int = 0):
        self.skipped = skipped
        self._policy, self._origin = policy, origin
        self._in_a_row = 0

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Judge the step that `values` are the metrics of.

        Raises:
            Diverged: naming the step and where it went wrong.
        """
        if not values.get("skipped_step") and math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]):
            self._in_a_row = 0
            return
        self.skipped += 1
        self._in_a_row += 1
        text = f"step {step}: loss {values['loss']}, gradient norm {values['grad_norm']}{self._origin(values)}"
        if self._policy == "abort":
            raise Diverged(f"{text}; the step was not applied (--set on_nonfinite=skip goes on after such a step)")
        if self._in_a_row >= MAX_CONSECUTIVE:
            raise Diverged(f"{text}; none of the last {self._in_a_row} steps was finite and could be applied")
        _log.warning("%s; the step was not applied, %d so far", text, self.skipped)
