"""Measurements. Each checks the answers before it prints a time."""
