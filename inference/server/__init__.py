"""The OpenAI-compatible server behind `headstart serve`. The only package that imports fastapi and
uvicorn."""
