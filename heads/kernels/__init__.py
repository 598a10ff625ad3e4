"""Kernels of training, and the choice of an implementation for every kernel."""
