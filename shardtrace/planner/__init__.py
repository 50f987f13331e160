"""Plans: which options of ``fsdp`` fit into a memory and are the fastest, predicted without running anything.

- Data: ``training_plan.py`` has the result, :class:`shardtrace.TrainingPlan`; ``fsdp`` takes it, too.
- Rates: ``calibrate.py`` measures what the machine does, keeps it in a cache, and chooses it for all ranks.
- Prediction: ``estimate.py`` has what is asked for, and says what a step and its optimizer cost. ``compose.py`` makes
  traces of steps that were not compiled of compiled ones.
- Search: ``search.py`` decides which families of strategies, and which of their steps, are predicted.
- ``contract.py`` chooses for one call of a model with a budget of memory, when it is compiled.
- ``planning.py`` reads the arguments of ``plan`` and writes its result.
"""
