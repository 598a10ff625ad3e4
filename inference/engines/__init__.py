"""Serving engines as their clients see them: requests, streamed answers, counters."""
