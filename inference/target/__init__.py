"""The target model: loading, attention, KV cache, taps, chat templates, memory."""
