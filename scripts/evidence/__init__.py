"""What makes the reports in docs/reports: one module per report (`python -m
scripts.evidence.NAME`)."""
