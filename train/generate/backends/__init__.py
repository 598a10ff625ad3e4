"""Sources of answers besides our own decoder: OpenAI-compatible servers, vLLM in this process."""
