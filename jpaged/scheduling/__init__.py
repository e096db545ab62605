"""Decides what runs in a step, and which blocks hold what. Imports no JAX."""
