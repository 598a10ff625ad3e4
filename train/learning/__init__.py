"""Learning from a running server's traffic: sampled answers become a short training, its candidate
is compared within the server, and taken or not (docs/learning.md)."""
