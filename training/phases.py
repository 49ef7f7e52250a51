"""What a rank does with its time, by name. Loads no torch."""

from typing import Literal

Phase = Literal["data_wait", "forward", "backward", "communication", "optimizer", "checkpoint"]

PHASES: tuple[Phase, ...] = (
    "data_wait",
    "forward",
    "backward",
    "communication",
    "optimizer",
    "checkpoint",
)
OTHER = "other"
"""What no phase took: the loop itself and its log."""
