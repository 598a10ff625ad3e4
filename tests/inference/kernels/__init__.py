"""Kernels run compiled where there is a GPU and under Triton's interpreter where there is none: see
tests/conftest.py.
"""
