"""Exports, model cards and pushes to the Hub, with measured numbers only."""
