"""Changed versions of the embedded target, for scripts/watch_report.py: fine-tuned, LoRA-merged; and prompts nobody has seen."""
