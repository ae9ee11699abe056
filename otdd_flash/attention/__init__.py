"""Attention whose weights are balanced by Sinkhorn iterations, without storing them."""
