"""Predicting what a training takes in memory, disk and time."""
