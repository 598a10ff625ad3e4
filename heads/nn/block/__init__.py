"""Parts of block drafters: DFlash, DFlash 2, DSpark, Domino and related methods."""
