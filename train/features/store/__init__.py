"""Features of the target on disk: written once by `headstart features`, read by every training on
the same answers."""
