"""An emulated CUDA device for tests: it allocates, counts, compiles and runs as a card does, without a card. See README.md."""
