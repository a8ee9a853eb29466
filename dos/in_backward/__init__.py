"""Updates during backward: each subgroup is updated once its gradients are final, and `step()` ends the iteration."""

from dos.in_backward.mode import InBackward
from dos.in_backward.refusals import STATE_READ, TAKEN, TOUCHED, UNENDED, check_updates
from dos.in_backward.runs import Run, stop_watching, watch_backwards

__all__ = [
    "STATE_READ",
    "TAKEN",
    "TOUCHED",
    "UNENDED",
    "InBackward",
    "Run",
    "check_updates",
    "stop_watching",
    "watch_backwards",
]
