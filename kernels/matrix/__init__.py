"""Passes over a cost matrix in memory: half-steps, sums of its plan, range and mean."""
