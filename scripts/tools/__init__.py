"""Tools for users besides the stages: searching, fitting and benchmarks (`python -m
scripts.tools.NAME`)."""
