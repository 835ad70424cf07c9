"""Checking a store's files without an engine: what is wrong, what it means, what repairs it."""
