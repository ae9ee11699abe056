"""Connections to other libraries: torchmetrics, scikit-learn, and trackers of runs.

Each module needs the package of its name, from the extra `integrations`, and is imported only where
it is used. `import otdd_flash` imports none of them.
"""
