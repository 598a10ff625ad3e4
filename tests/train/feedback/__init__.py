"""Tests of train/feedback: records become weights, choices of tokens, and prompts."""
