"""The scripts behind the reports in docs/reports: one module per report (`python -m
scripts.evidence.NAME`)."""
