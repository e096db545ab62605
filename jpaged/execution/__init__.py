"""Computes steps: owns the device's state and the compiled programs."""
