"""Connections to other libraries: torchmetrics, scikit-learn, and trackers of runs.

`torchmetrics`, `sklearn` and `detector` are for users to import; `tracking` writes the runs that
`commands.results` hands to it, by mlflow, tensorboard or wandb. Each needs the package of its name,
from the extra `integrations` (scikit-learn is always installed), so it is imported only where it is
used, and `import otdd_flash` imports none of them.
"""
