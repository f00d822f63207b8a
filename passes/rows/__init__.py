"""Runs row-by-row ops of a joint graph part by part: the rules of ops and the rewrite, for the chunked loss and for tiles."""
