"""``python -m autoremat`` is the command ``autoremat``."""

from autoremat.cli import main

if __name__ == "__main__":
    main(prog_name="autoremat")
