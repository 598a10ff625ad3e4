"""Fast paths of single operations, each tested against its plain-torch meaning."""
