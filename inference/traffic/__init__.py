"""What speculation gains on given traffic: a server with continuous batching, simulated with this
machine's measured costs."""
