"""Configuration: which groups a stage reads, their classes, and how YAML becomes settings."""
