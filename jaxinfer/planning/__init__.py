"""Planning a model for chips that this machine does not have: memory, bytes, FLOPs, and the least time of a step."""

from jaxinfer.chips import chip_of_kind
from jaxinfer.planning.chips import Chip, Place, chips, parse_place
from jaxinfer.planning.plan import Change, Memory, MemoryPlan, PlanRequest
from jaxinfer.planning.planner import make_plan, plan_here
from jaxinfer.planning.remedy import changes

__all__ = [
    "Change",
    "Chip",
    "Memory",
    "MemoryPlan",
    "Place",
    "PlanRequest",
    "changes",
    "chip_of_kind",
    "chips",
    "make_plan",
    "parse_place",
    "plan_here",
]
