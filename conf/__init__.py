"""The Hydra configuration: base.yaml, roots of stages that differ from it, one folder per group.

It is a package so that it is found from any directory.
"""
