"""What a person runs: the `headstart` stages and the script that makes the embedded target."""
