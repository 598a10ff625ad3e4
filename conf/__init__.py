"""The Hydra configuration: one root YAML per stage, one folder per group. A package so that it is found from any directory."""
