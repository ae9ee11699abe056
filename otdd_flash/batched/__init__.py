"""Many small matrices side by side."""
