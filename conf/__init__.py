"""Hydra configuration: one folder per choice."""
