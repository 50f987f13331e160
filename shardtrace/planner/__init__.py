"""Plans: which options of ``fsdp`` fit into a memory and are the fastest, predicted without running anything.

- Data: :class:`shardtrace.TrainingPlan` (``shardtrace/options/planned.py``, because ``fsdp`` takes it) is the result.
- Prediction: ``estimate.py`` has what is asked for, and says what a step and its optimizer cost. ``compose.py`` makes
  traces of steps that were not compiled of compiled ones.
- Search: ``search.py`` decides which families of strategies, and which of their steps, are predicted.
- ``contract.py`` chooses for one call of a model with a budget of memory, when it is compiled.
- ``planning.py`` reads the arguments of ``plan`` and writes its result.
"""

from shardtrace.planner.contract import MemoryBudgetError
from shardtrace.planner.planning import plan

__all__ = ["MemoryBudgetError", "plan"]
