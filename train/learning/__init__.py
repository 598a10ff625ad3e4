"""Learning from a running server's traffic: a short training on sampled answers produces a
candidate, which is compared within the server and then taken or rejected (docs/learning.md)."""
