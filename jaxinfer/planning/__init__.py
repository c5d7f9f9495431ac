"""What a model needs on chips that are not at hand: memory, bytes, FLOPs, and the least time of a step."""

from jaxinfer.planning.chips import Chip, Place, chip_of_kind, chips, parse_place
from jaxinfer.planning.plan import Memory, MemoryPlan, PlanRequest, make_plan
from jaxinfer.planning.remedy import Change, changes
from jaxinfer.planning.report import to_dict, to_text

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
    "to_dict",
    "to_text",
]
