"""Kernels of Sinkhorn attention: passes over the scores of many heads, which are never stored.

`otdd_flash.attention.passes` calls them.
"""
