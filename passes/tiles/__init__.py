"""Tiles: computes stretches of row-by-row ops, such as an MLP, tile by tile, forward and backward."""
