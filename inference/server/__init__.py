"""The OpenAI-compatible server behind `headstart serve`. The only package that imports fastapi;
`front`, its HTTP side, does not, and is that of feature servers too."""
