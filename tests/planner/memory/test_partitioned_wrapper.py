"""The replay of code for CUDA graphs, with partitions and a pool of their own, and of wrappers in C++."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

import pytest
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


CPP = """
cpp_wrapper_src = (r'''
void inductor_entry_impl(
    AtenTensorHandle*
        input_handles) {
    auto primals_1 = std::move(inputs[0]);
    auto saved = std::move(inputs[1]);
    static constexpr int64_t int_array_0[] = {4L, 10L};
    static constexpr int64_t int_array_1[] = {10L, 1L};
    AtenTensorHandle buf0_handle;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(2, int_array_0, int_array_1, cached_torch_dtype_float32, \
cached_torch_device_type_cuda, 0, &buf0_handle));
    RAIIAtenTensorHandle buf0(buf0_handle);
    call_triton_poi_fused_add_0(saved, buf0, 40L, 0, stream0);
    saved.reset();
    auto buf1 = std::move(buf0);  // reuse
    auto buf2 = wrap_with_raii_handle_if_needed(reinterpret_tensor_wrapper(buf1, 1, int_array_2, int_array_2, 0L)); \
buf1.reset();  // reuse
    AtenTensorHandle buf4_handle;
    AtenTensorHandle buf5_handle;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_topk(buf2, 2L, -1L, 1, 1, &buf4_handle, &buf5_handle));
    RAIIAtenTensorHandle buf4(buf4_handle);
    RAIIAtenTensorHandle buf5(buf5_handle);
    buf2.reset();
    AtenTensorHandle tmp_primals_1_0;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(primals_1, &tmp_primals_1_0));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_mm_out(buf4, buf5, RAIIAtenTensorHandle(tmp_primals_1_0)));
    BRANCH
    AtenTensorHandle buf6_handle;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, s0, s0, cached_torch_dtype_float32, \
cached_torch_device_type_cuda, 0, &buf6_handle));
    RAIIAtenTensorHandle buf6(buf6_handle);
    RAIIAtenTensorHandle buf7;
    {
        std::array<StableIValue, 1> dispatch_vars{torch::stable::detail::from(tmp_var_0)};
        AOTI_TORCH_ERROR_CODE_CHECK(
            aoti_torch_call_dispatcher("aten::special", "", dispatch_vars.data())
        );
        buf7 = torch::stable::detail::to<AtenTensorHandle>(dispatch_vars[0]);
    }
    output_handles[0] = buf4.release();
} // inductor_entry_impl
''')
"""
SIZES = {"buf4": 7, "buf5": 8, "buf6": 1000, "buf7": 500}


def cpp_peak(source: str, workspaces: Mapping[str, Mapping[int, int]] = {}) -> int | None:
    return replay_peak(source, {"saved": 100}, lambda name: SIZES.get(name, 0), workspaces=workspaces)


@pytest.mark.parametrize(
    ("workspaces", "expected"),
    [
        ({}, 7 + 8 + 1000 + 500),
        ({"topk": {15: 3000}}, 160 + 7 + 8 + 3000),
        ({"mm": {7: 3000}}, 7 + 8 + 3000),
        ({"special": {500: 10}}, 7 + 8 + 1000 + 500 + 10),
    ],
)
def test_a_wrapper_in_cpp_is_replayed_too(workspaces, expected):
    assert cpp_peak(CPP.replace("BRANCH", ""), workspaces) == expected


def test_a_wrapper_in_cpp_that_branches_is_not_replayed():
    assert cpp_peak(CPP.replace("BRANCH", "if (buf4_scalar) {\n        buf5.reset();\n    } else {\n    }")) is None
