"""Prediction of a training's memory, disk space and time."""
