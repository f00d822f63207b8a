"""What every test gets: fixed seeds, options of its own, and no CUDA tests where there is no CUDA."""

import gc
import logging
import os
import random
import shutil
import sys
from collections.abc import Iterator

import numpy
import pytest
import strategies
from folders import TESTS
from hypothesis import is_hypothesis_test, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from autoremat.basics import environment
from autoremat.options.options import configure
from autoremat.report import registry

SEED = 0

# The compiler knows the instructions of the processor. Inductor would try them again in every new cache folder.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Identical C++ code is compiled once, by all processes and runs together. ccache would not help: Inductor compiles and links
# in one command.
if shutil.which("g++"):
    os.environ.setdefault("CXX", str(TESTS / "compiler_cache" / "g++"))

QUICK_SHARE = 8
QUICK_EXAMPLES = range(2, 11)
"""The quick suite draws an eighth of the examples that a property asks for, 2 to 10; `make test-properties` draws all."""

# Compiling takes long, and runs must be reproducible.
settings.register_profile("default", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--examples", type=int, help="run the properties alone, with so many examples drawn at random")
    parser.addoption(
        "--fixed-seed",
        action="store_true",
        help="with --examples: at least as many as a property asks for, the same every time",
    )
    parser.addoption("--max-ops", type=int, help="no random graph has more ops: many small examples instead of few large ones")


def pytest_configure(config: pytest.Config) -> None:
    strategies.MAX_OPS = config.getoption("max_ops")


DEAREST = {"test_emulated_cuda.py", "test_models.py", "test_training.py"}
"""The files that take longest. They run first, so that no worker is left alone with one of them in the end."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in DEAREST)
    examples, fixed = config.getoption("examples"), config.getoption("fixed_seed")
    for item in items:
        test = getattr(item, "obj", None)
        if not is_hypothesis_test(test):
            continue
        own = test._hypothesis_internal_use_settings  # there is no public way past a test's own settings
        if examples:
            number = max(own.max_examples, examples) if fixed else examples
            # A random example that fails is kept, and comes first in the next run.
            database = None if fixed else DirectoryBasedExampleDatabase(".hypothesis/examples")
            chosen = settings(own, max_examples=number, derandomize=fixed, database=database)
        else:
            few = min(max(own.max_examples // QUICK_SHARE, QUICK_EXAMPLES[0]), QUICK_EXAMPLES[-1])
            chosen = own if item.get_closest_marker("slow") else settings(own, max_examples=few)
        test._hypothesis_internal_use_settings = chosen
    if examples:
        others = [item for item in items if not is_hypothesis_test(getattr(item, "obj", None))]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return  # the pure tests do without torch
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Switches off what takes time and shows nothing: torch's trace, and the garbage collector for what the imports made."""
    logging.getLogger("torch.__trace").propagate = True  # pytest listens where it is not; torch prints all graphs to listeners
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Cache folders of this run: nothing of an earlier one answers, and the user's stay as they are. Seconds from data sheets,
    which are the same on every machine, also for what modules set up once."""
    folder = tmp_path_factory.mktemp("caches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOREMAT_CACHE_DIR", str(folder / "autoremat"))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        patch.setenv(environment.COST_MODEL, "roofline")
        patch.setenv(environment.PROGRESS, "0")  # its own tests switch it on
        yield


@pytest.fixture(autouse=True)
def seed() -> Iterator[int]:
    """Seeds all generators; afterwards forgets what Dynamo compiled. Neither imports torch."""
    random.seed(SEED)
    numpy.random.seed(SEED)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(SEED)
    yield SEED
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    if "autoremat.compiler.overlap_warning" in sys.modules:
        sys.modules["autoremat.compiler.overlap_warning"].reset()


@pytest.fixture(autouse=True)
def contract_of_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares what passes must preserve, where they are loaded."""
    if "autoremat.passes" in sys.modules:
        from pass_contract import run_and_compare

        monkeypatch.setattr(sys.modules["autoremat.passes"], "_run", run_and_compare)


@pytest.fixture(autouse=True)
def isolated_options(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No budget or policy from outside: neither from the environment nor from an earlier test."""
    for variable in (environment.BUDGET, environment.POLICY):
        monkeypatch.delenv(variable, raising=False)
    configure()
    if len(registry._reports) > registry.KEPT // 2:
        registry._reports.clear()  # tests count them: none is to meet the bound
    yield
    configure()
