"""Plans: which options of ``fsdp`` fit into a memory and are the fastest, predicted without running anything.

- Data: :class:`shardtrace.TrainingPlan` (``shardtrace/options/planned.py``, because ``fsdp`` takes it) is the result.
  ``task.py`` has what is asked for.
- Prediction: ``family.py`` has the steps of one family of strategies. ``compose.py`` makes their traces of compiled
  ones, ``estimate.py`` says what a step costs, ``optimizer.py`` what an optimizer adds.
- Search: ``search.py`` decides which families and which of their steps are predicted; ``program.py`` proposes steps.
- ``planning.py`` reads the arguments of ``plan`` and writes its result.
"""

from shardtrace.planner.planning import plan

__all__ = ["plan"]
