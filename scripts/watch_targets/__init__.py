"""Changed versions of the embedded target, for scripts/evidence/staleness.py: fine-tuned, LoRA-merged; and prompts nobody has seen."""
