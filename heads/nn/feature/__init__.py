"""Drafters that continue the target's own hidden states: EAGLE, EAGLE-3, P-EAGLE, MTP."""
