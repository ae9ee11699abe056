"""One iteration of many problems side by side: passes, what they tell, decisions, moves."""
