"""What leaves the project: model cards and pushes to the Hub, with measured numbers only."""
