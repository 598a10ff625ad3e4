"""Running a stage: its folder and records, sweeps, signals, and the drafters of a run."""
