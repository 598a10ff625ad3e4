"""Stages that hand drafters to others and fetch theirs: export, import, push, pull."""
