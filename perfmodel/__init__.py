"""Everything about an optimizer update that can be decided without a tensor. Needs numpy, never torch."""

from perfmodel.plan import Placement, Plan
from perfmodel.timeline import Lane, Op, Span, Timeline
from perfmodel.workload import SubgroupLoad, Workload

__all__ = ["Lane", "Op", "Placement", "Plan", "Span", "SubgroupLoad", "Timeline", "Workload"]
