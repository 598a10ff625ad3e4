"""Tests of train/data: sources, judging, conversations, servers."""
