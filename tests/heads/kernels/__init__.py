"""Kernels of training, interpreted where there is no GPU: see tests/conftest.py."""
