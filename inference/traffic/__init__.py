"""The gain of speculation on given traffic: simulates a server with continuous batching, with this
machine's measured costs."""
