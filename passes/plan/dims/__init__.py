"""How dims of results relate to dims of operands, for each function of torch, as data."""

from passes.plan.dims.reductions import RESHAPES, moved
from passes.plan.dims.relation import Relation
from passes.plan.dims.table import TABLE, VIEWS, canonical, is_linear, known

__all__ = ["RESHAPES", "TABLE", "VIEWS", "Relation", "canonical", "is_linear", "known", "moved"]
