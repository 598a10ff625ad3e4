"""Targets that do not fit one training process: loaded in part, or sharded."""
