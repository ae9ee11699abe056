"""Small problems whose scores are stored: making them, passes over them, plans.

`operators.kernel_pool` calls them.
"""
