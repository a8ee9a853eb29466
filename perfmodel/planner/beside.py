"""Compute beside copies: kernels take longer while the device copies both ways."""

from __future__ import annotations

import dataclasses

from perfmodel.hardware import HardwareProfile
from perfmodel.simulate import serve
from perfmodel.tasks import Schedule
from perfmodel.timeline import Lane, Op
from perfmodel.workload import Workload

SLOWER = 0.07
"""How much longer kernels take while the device copies both ways. Measured: 5 to 7% by others who train from host
memory (github.com/als244/dataflow); by us 9% of forward and 1% of backward on an H200. Copies one way do not count."""


def seconds_of(schedule: Schedule, workload: Workload, profile: HardwareProfile) -> float:
    """Seconds of a schedule, with forward and backward longer by SLOWER of the time beside copies both ways.

    Served twice: the first time says how long that is.
    """
    timeline = serve(schedule, workload, profile)
    forward, backward = (timeline.beside_both(op, Lane.H2D, Lane.D2H) for op in (Op.FORWARD, Op.BACKWARD))
    if not forward + backward:
        return timeline.makespan
    slower = dataclasses.replace(
        workload, forward_s=workload.forward_s + SLOWER * forward, backward_s=workload.backward_s + SLOWER * backward
    )
    # With longer compute other operations may come first, and the whole may end sooner: that is no gain to count on.
    return max(timeline.makespan, serve(schedule, slower, profile).makespan)
