"""Connections to other libraries: torchmetrics, scikit-learn, and trackers of runs.

`torchmetrics` and `sklearn` are for users to import; `mlflow`, `tensorboard` and `wandb` write the
runs that `commands.results` hands to `tracking`. Each needs the package of its name, from the extra
`integrations` (scikit-learn is always installed), so it is imported only where it is used, and
`import otdd_flash` imports none of them.
"""
