"""Where figures go besides log.jsonl: one module per service, each imported only when asked for."""
