"""Where people already are: torchmetrics, scikit-learn, and trackers of runs.

Each module needs the package of its name, from the extra `integrations`, and is imported only where
it is used. Nothing here is imported with `otdd_flash`.
"""
