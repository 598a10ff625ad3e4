"""The OpenAI-compatible server behind `headstart serve`. Only this package imports fastapi; its
HTTP side, `front`, does not, as feature servers use it too."""
