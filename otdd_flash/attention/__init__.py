"""Attention whose weights are balanced by Sinkhorn iterations, without storing them.

`otdd_flash` exports `sinkhorn_attention`, and `nn` calls it.
"""
