"""The only importer of torch's private names. It decides nothing about plans."""
