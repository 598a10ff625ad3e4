"""Tracking services besides log.jsonl: one module per service, imported only if configured."""
