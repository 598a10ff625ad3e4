"""Stages that exchange drafters with others: export, import, push, pull."""
