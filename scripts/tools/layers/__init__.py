"""Which of a target's layers draft best for it: elimination of layers, and a search by decoding."""
