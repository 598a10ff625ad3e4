"""Hidden states of a vLLM engine as features."""
