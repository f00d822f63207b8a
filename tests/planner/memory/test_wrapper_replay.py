"""The replay on small sources in the form that Inductor generates."""

import re
import textwrap
from typing import Any

import pytest
from wrapper_sources import FLOAT, empty, peak, replay_peak


def lines_of(statements: str) -> str:
    """Statements with `;` between them as lines. `E(n)` stands for the allocation of n floats."""
    return re.sub(r"E\((\d+)\)", lambda found: empty(int(found[1])), statements).replace("; ", "\n")


def call_of(statements: str) -> str:
    return "def call(args):\n" + textwrap.indent(lines_of(statements), "    ")


@pytest.mark.parametrize(
    ("statements", "floats"),
    [
        # Allocations add up and deletions free.
        ("buf0 = E(10); cpp_fused_0(primals_1, buf0); buf1 = E(100); del buf0; buf2 = E(50); return (buf1, buf2)", 150),
        # Reuse allocates nothing and keeps the storage.
        ("buf0 = E(10); buf1 = buf0; del buf0  # reuse; buf2 = E(3); del buf1; buf3 = E(10)", 13),
        ("buf0 = E(10); buf1 = reinterpret_tensor(buf0, (5, 2), (2, 1), 0); del buf0; buf2 = E(3); del buf1; buf3 = E(10)", 13),
        # A storage is freed with its last name.
        ("buf0 = E(10); buf1 = reinterpret_tensor(buf0, (10,), (1,), 0); del buf0; buf2 = E(100); del buf1; buf3 = E(7)", 110),
        ("buf0 = E(10); buf0 = E(20); buf1 = E(100)", 120),
    ],
)
def test_what_is_alive_adds_up(statements, floats):
    assert peak(lines_of(statements)) == 4 * floats


def test_statements_in_with_blocks_count_in_place():
    body = f"""
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = empty_strided_cuda((10,), (1,), {FLOAT})
            with another():
                buf1 = empty_strided_cuda((100,), (1,), {FLOAT})
                del buf0
            buf2 = empty_strided_cuda((5,), (1,), {FLOAT})
        return (buf1, buf2)
    """
    assert peak(body) == 4 * 110


@pytest.mark.parametrize(
    ("statements", "expected", "fields"),
    [
        # Inputs count until they are deleted, unless the caller holds them.
        ("x, addmm = args; args.clear(); buf0 = E(10); del addmm; buf1 = E(100)", 1040, {"inputs": {"addmm": 1000}}),
        ("x, addmm = args; args.clear(); buf0 = E(10); del addmm; buf1 = E(100)", 440, {"inputs": {"addmm": 100}}),
        ("addmm, x = args; del addmm; buf0 = E(10)", 1000, {"inputs": {"addmm": 1000}}),
        ("addmm, x = args; del addmm; buf0 = E(10)", 1040, {"inputs": {"addmm": 1000}, "held": ("addmm",)}),
        # One that is reused in place counts once, one that is aligned takes no more.
        ("mul, x = args; buf0 = mul; del mul  # reuse; buf1 = E(10); del buf0; buf2 = E(20)", 140, {"inputs": {"mul": 100}}),
        (
            "primals_2 = copy_if_misaligned(primals_2); saved = copy_if_misaligned(saved); buf0 = E(10); del primals_2; "
            "del saved; buf1 = E(20)",
            120,
            {"inputs": {"saved": 40}, "sizes": {"primals_2": 10**6, "saved": 40}},
        ),
        ("buf0 = E(1); buf1 = E(129)", 512 + 1024 + 1024, {"inputs": {"mul": 513}, "round_to": 512}),
        (f"buf0 = empty_strided_cpu((s0, 3), (3, 1), {FLOAT})", 60, {"sizes": {"buf0": 60}}),  # a symbol
        # A renamed result counts under its new name.
        ("buf1 = kernel(x); buf2 = buf1; del buf1; buf3 = E(50)", 600, {"sizes": {"buf2": 400}}),
        ("buf1 = kernel(x); buf2 = buf1; del buf1; buf3 = E(50)", 600, {"sizes": {"buf1": 400}}),
        # Views that aten makes share the storage.
        (
            "buf0 = E(10); buf1 = torch.ops.aten.slice.Tensor(buf0, 0, 0, 5); buf2 = buf1; del buf1; del buf0; "
            "buf3 = torch.ops.aten.view_as_real.default(buf2); buf4 = E(10)",
            80,
            {"sizes": {"buf1": 20, "buf2": 20, "buf3": 20}},
        ),
    ],
)  # fmt: skip
def test_inputs_and_results_of_kernels(statements: str, expected: int, fields: dict[str, Any]):
    assert peak(lines_of(statements), **fields) == expected


def test_unpacked_results_live_as_long_as_their_own_name():
    body = """
        buf1 = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v)
        buf2 = buf1[0]
        buf3 = buf1[1]
        del buf1
        buf4 = torch.ops.aten.other.default(buf2)
        del buf3
        del buf2
        buf5 = torch.ops.aten.other.default(buf4)
    """
    assert peak(body, sizes={"buf2": 100, "buf3": 10, "buf4": 5, "buf5": 90}) == 115
    assert peak(body.replace("del buf3", ""), sizes={"buf2": 100, "buf3": 10, "buf4": 5, "buf5": 1000}) == 1015


@pytest.mark.parametrize(
    ("allocation", "size"),
    [
        (f"empty_strided_cpu((2, 3), (8, 1), {FLOAT})", 4 * 11),  # gaps between rows count, behind the last they do not
        (f"empty_strided_cpu((), (), {FLOAT})", 4),
        (f"empty_strided_cpu((4, 0), (1, 1), {FLOAT})", 0),
        (f"empty_strided_cpu((4, 4), (0, 1), {FLOAT})", 16),
        ("empty_strided_cpu((6,), (1,), torch.bool)", 6),
        ("empty_strided_cpu((6,), (1,), torch.bfloat16)", 12),
        ("empty_strided_cuda((6,), (1,), torch.int64)", 48),
        ("empty_strided_cpu((6,), (1,), torch.complex128)", 96),
    ],
)
def test_bytes_of_an_allocation(allocation, size):
    assert peak(f"buf0 = {allocation}") == size


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def partition_0(args):\n    pass\n\ndef call(args):\n    pass\n", None),  # a partition that is not called
        ("def other(args):\n    pass\n", None),
        ("", None),
        (f"class Runner:\n    def call(self, args):\n        buf0 = {empty(10)}\n        return (buf0,)\n", 40),
        (f"def helper():\n    buf9 = {empty(999)}\n\ndef call(args):\n    buf0 = {empty(10)}\n", 40),
    ],
)
def test_the_call_is_found_and_code_of_another_form_is_not_guessed_at(source, expected):
    assert replay_peak(source, {}, lambda _: 0) == expected


@pytest.mark.parametrize(("strides", "copied"), [((512, 1, 32, 2), 0), ((512, 256, 16, 1), 4 * 4 * (512 + 512))])
@pytest.mark.parametrize("reused", [False, True])
def test_planar_images_are_copied_to_differentiate_their_convolution(strides, copied, reused):
    shape = f"(4, 2, 16, 16), {strides}"
    reuse = f"buf9 = E(2048); buf0 = reinterpret_tensor(buf9, {shape}, 0); del buf9  # reuse"
    statements = f"""{reuse if reused else f"buf0 = empty_strided_cpu({shape}, {FLOAT})"}
buf1 = empty_strided_cpu((4, 2, 16, 16), (512, 1, 32, 2), {FLOAT})
buf2 = torch.ops.aten.convolution_backward.default(buf1, buf0, primals_1, [0], (1, 1))
return (buf2,)"""
    needed = {"convolution_backward": {0: 100}}
    assert replay_peak(call_of(statements), {}, lambda name: 0, workspaces=needed) == 2 * 4 * 4 * 512 + 100 + copied


def test_buffers_on_the_host_do_not_count_for_another_device():
    cuda, pinned = f"empty_strided_cuda((%d,), (1,), {FLOAT})", f"empty_strided_cpu_pinned((100,), (1,), {FLOAT})"
    reuse = "buf2 = buf1; del buf1  # reuse"
    source = call_of(f"buf0 = {cuda % 10}; buf1 = E(100); {reuse}; buf3 = {pinned}; buf4 = {cuda % 20}")
    assert replay_peak(source, {}, lambda _: 0, device_type="cuda") == 120
    assert replay_peak(source, {}, lambda _: 0) == 920


def test_a_copy_on_the_host_takes_no_memory_of_the_device_and_its_source_lives_to_the_wait():
    forward = lines_of(
        "buf0 = E(100); buf1 = torch.ops.autoremat.copy_to_host.default(buf0, 400); buf2 = E(10); "
        "buf3 = torch.ops.autoremat.wait_for_copy_to_host.default(buf1, buf0); del buf0; del buf1; buf4 = E(30)"
    )
    assert peak(forward, sizes={"buf1": 400, "buf3": 400}) == 4 * 110
    backward = lines_of(
        "buf0 = E(10); buf1 = torch.ops.autoremat.wait_for_copy_to_host.default(kept, saved); del saved; del kept; "
        "buf2 = E(20); buf3 = torch.ops.autoremat.copy_from_host.default(buf1, device(type='cpu')); "
        "buf4 = torch.ops.autoremat.wait_for_copy_from_host.default(buf3, buf1); del buf3; del buf1; return (buf0, buf2, buf4)"
    )
    sizes = {"buf1": 400, "buf3": 400, "buf4": 400}
    assert peak(backward, inputs={"kept": 400, "saved": 400}, sizes=sizes) == 4 * 130
    assert peak(backward.replace("del saved", ""), inputs={"kept": 400, "saved": 400}, sizes=sizes) == 4 * 230


def test_a_copy_from_the_host_is_memory_of_the_device_from_its_begin_and_its_source_is_none():
    backward = lines_of(
        "buf0 = torch.ops.autoremat.copy_from_host.default(kept, device(type='cpu')); buf1 = E(10); "
        "buf2 = torch.ops.autoremat.wait_for_copy_from_host.default(buf0, kept); del buf0; del kept; buf3 = E(1); del buf2; "
        "buf4 = E(50)"
    )
    sizes = {"buf0": 400, "buf2": 400}
    assert peak(backward, inputs={"kept": 400}, sizes=sizes) == 4 * 111
    assert peak(backward.replace("del buf2", ""), inputs={"kept": 400}, sizes=sizes) == 4 * 161


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        ("buf0 = torch.ops.aten.kernel.default(x); buf1 = buf0; del buf0; return (buf1,)", 1400),
        ("buf2 = E(100); extern_kernels.kernel(x, out=buf2); return (buf2,)", 1400),
        ("aten.kernel_(x); extern_kernels.kernel(x); return ()", 9000),  # nothing says which call it is
    ],
)
def test_a_workspace_is_that_of_the_call_with_results_of_its_size(statements, expected):
    workspaces = {"kernel": {400: 1000, 4000: 9000}}
    assert replay_peak(call_of(statements), {}, lambda name: 400 * (name == "buf1"), workspaces=workspaces) == expected


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        ("buf1 = torch.ops.aten.kernel.default(x); return (buf1,)", 410),
        ("buf4 = torch.ops.aten.kernel.default(x); return (buf4,)", 400),
        ("buf3 = E(100); extern_kernels.kernel(x, out=buf3); return (buf3,)", 9400),
        ("buf3 = E(100); extern_kernels.kernel(x, out=reinterpret_tensor(buf3, (10, 10), (10, 1), 0)); return (buf3,)", 9400),
        ("buf7 = E(100); extern_kernels.kernel(x, out=buf7); return (buf7,)", 1400),  # no node is known: the size decides
    ],
)
def test_a_workspace_is_that_of_the_node_whose_kernel_writes_the_buffer(statements, expected):
    workspaces, by_node = {"kernel": {400: 1000, 404: 9000}}, {"buf1": 10, "buf3": 9000, "buf4": 0}
    sizes = {"buf1": 400, "buf4": 400}
    found = replay_peak(call_of(statements), {}, lambda n: sizes.get(n, 0), workspaces=workspaces, workspace_of=by_node.get)
    assert found == expected


def test_the_workspace_of_a_nested_region_counts_where_no_other_op_has_one():
    source = call_of("buf0 = [None] * 1; buf0 = region(region_args); return (buf0[0],)")
    sizes = {"buf0": 400}
    assert replay_peak(source, {}, lambda name: sizes.get(name, 0), workspaces={}, workspace_of={"buf0": 100}.get) == 500
