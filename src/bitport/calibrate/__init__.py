"""Calibration: run a model on example inputs to observe the inputs of its layers."""
