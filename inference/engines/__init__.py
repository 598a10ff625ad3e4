"""Serving engines from the client's side: requests, streamed answers, counters."""
