"""The replay of code for CUDA graphs, with partitions and a pool of their own, and of wrappers in C++."""

import textwrap
from collections.abc import Mapping

from wrapper_sources import empty, replay_peak

from autoremat.planner.memory.wrapper_replay import ReplayedPeak, replay

PARTITIONED = """
def partition_0(args):
    x, primals_1, saved = args
    args.clear()
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        saved = copy_if_misaligned(saved)
        buf0 = empty_strided_cuda((100, ), (1, ), torch.float32)
        extern_kernels.mm(x, primals_1, out=buf0)
        del primals_1
        buf1 = saved; del saved  # reuse
        buf2 = empty_strided_cuda((10, ), (1, ), torch.float32)
        triton_poi_fused_0.run(buf0, buf1, buf2, 10, stream=raw_stream0)
        buf3 = torch.ops.aten.special.default(buf2)
        del buf0
    return (x, buf1, buf3, )
def partition_1(args):
    x, buf1, buf5 = args
    args.clear()
    with torch.cuda._DeviceGuard(0):
        buf6 = empty_strided_cuda((40, ), (1, ), torch.float32)
        triton_poi_fused_1.run(x, buf1, buf5, buf6, 40, stream=raw_stream0)
        del x
        del buf1
        del buf5
    return (reinterpret_tensor(buf6, (4, 10), (10, 1), 0), )

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def recursively_apply_fns(self, fns):
        new_callables = []
        for fn, c in zip(fns, self.partitions):
            new_callables.append(fn(c))
        self.partitions = new_callables

    def call(self, args):
        x, primals_1, saved = args
        args.clear()
        partition0_args = [x, primals_1, saved]
        del x, primals_1, saved
        (x, buf1, buf3) = self.partitions[0](partition0_args)
        del partition0_args
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf5 = empty_strided_cuda((1000, ), (1, ), torch.float32)
            buf5.copy_(other, False)
        del buf3
        partition1_args = [x, buf1, buf5]
        del x, buf1, buf5
        (buf7,) = self.partitions[1](partition1_args)
        del partition1_args
        LATER
        return (buf7, )

runner = Runner(partitions=[partition_0, partition_1])
call = runner.call
"""
"""Code for CUDA graphs in Inductor's form: `x` is an input of the step, `saved` one that counts, `buf5` is not recorded."""

SAVED, X, FIRST, SECOND, SPECIAL, BETWEEN, LAST = 500, 600, 400, 40, 300, 4000, 160


def partitioned_peak(later: str = "", copied: Mapping[str, int] | None = None, held=()) -> int | None:
    source = PARTITIONED.replace("LATER", later)
    return replay_peak(source, {"saved": SAVED}, lambda name: SPECIAL if name == "buf3" else 0, held, copied=copied)


def test_partitions_are_replayed_where_they_are_called():
    assert partitioned_peak() == SAVED + SPECIAL + BETWEEN
    after = f"buf9 = {empty(2000)}"
    assert partitioned_peak(after) == LAST + 8000  # what the partitions do not return is gone
    workspaces = {"special": {SPECIAL: 9000}}
    replayed = replay_peak(PARTITIONED, {"saved": SAVED}, lambda name: SPECIAL * (name == "buf3"), workspaces=workspaces)
    assert replayed == SAVED + FIRST + SECOND + SPECIAL + 9000


def test_what_the_caller_of_partitions_holds_is_not_freed():
    after = f"buf9 = {empty(2000)}"
    assert partitioned_peak(after, held=("saved",)) == SAVED + LAST + 8000


def test_the_pool_of_cuda_graphs_is_counted_apart():
    def replayed(copied: Mapping[str, int] | None, workspaces: Mapping[str, Mapping[int, int]] = {}) -> ReplayedPeak | None:
        sizes = {"buf3": SPECIAL}
        return replay(PARTITIONED, {"saved": SAVED}, lambda name: sizes.get(name, 0), workspaces=workspaces, copied=copied)

    assert replayed({"x": X}) == ReplayedPeak(pool_bytes=SAVED + X + BETWEEN + LAST, other_bytes=BETWEEN)
    # `saved` is copied too, as a tangent is; its original is freed unless the caller holds it.
    assert replayed({"x": X, "saved": SAVED}) == replayed({"x": X})
    assert partitioned_peak(copied={"x": X, "saved": SAVED}, held=("saved",)) == 2 * SAVED + X + 2 * BETWEEN + LAST
    assert partitioned_peak(copied={}) == SAVED + 2 * BETWEEN + LAST
    in_pool = SAVED + X + FIRST + SECOND + SPECIAL + 9000
    assert replayed({"x": X}, {"special": {SPECIAL: 9000}}) == ReplayedPeak(in_pool, BETWEEN)
    without_graphs = replayed(None)
    assert without_graphs is not None
    assert without_graphs.pool_bytes == 0


def test_a_whole_graph_that_is_recorded_copies_its_inputs():
    body = f"""
        x, saved, tangents_1 = args
        args.clear()
        buf0 = {empty(10)}
        del x
        del tangents_1
        buf1 = {empty(100)}
    """
    source = "def call(args):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    counted = {"saved": 50, "tangents_1": 70}

    def replayed(copied: Mapping[str, int] | None) -> int | None:
        return replay_peak(source, counted, lambda name: 0, ("tangents_1",), copied=copied)

    assert replayed(None) == 50 + 70 + 440
    assert replayed({"x": 1000, "tangents_1": 70}) == 50 + 2 * 70 + 1000 + 40
    assert replayed({"tangents_1": 70}) == 50 + 70 + 440


def test_a_wrapper_in_cpp_is_not_replayed():
    assert replay_peak("cpp_wrapper_src = (r'''\nvoid inductor_entry_impl() {}\n''')", {}, lambda name: 0) is None
