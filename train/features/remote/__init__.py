"""Feature servers: the frozen target behind HTTP, and the trainer's client."""
