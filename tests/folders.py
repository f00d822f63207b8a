"""The folders of the project."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
