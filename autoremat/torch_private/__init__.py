"""The only importer of torch's private names. Nothing here decides anything about plans."""
