"""Small problems whose scores are stored: making them, passes over them, plans."""
