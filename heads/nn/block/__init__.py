"""Block drafters: the parts of DFlash, DFlash 2, DSpark, Domino and their relatives."""
