"""Triton kernels; called by kvstore.transfer alone."""
