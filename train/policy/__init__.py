"""Drafters that follow a policy: rollouts by the decoder, new weights of the target between them,
and a few training steps on the latest answers."""
