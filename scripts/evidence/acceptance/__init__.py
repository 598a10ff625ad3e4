"""What a device must show before figures of it are believed (`python -m scripts.evidence.gpu`)."""
