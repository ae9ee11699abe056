"""One iteration of many problems side by side: passes, evaluations, decisions, moves."""
