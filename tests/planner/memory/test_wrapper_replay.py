"""The replay on small sources in the form that Inductor generates."""

from __future__ import annotations

import textwrap

import pytest
from wrapper_sources import FLOAT, empty, peak, replay_peak


def test_allocations_add_up_and_deletions_free():
    body = f"""
        buf0 = {empty(10)}
        cpp_fused_0(primals_1, buf0)
        buf1 = {empty(100)}
        del buf0
        buf2 = {empty(50)}
        return (buf1, buf2)
    """
    assert peak(body) == 4 * 150


def test_inputs_that_are_aligned_take_no_memory():
    body = f"""
        primals_2 = copy_if_misaligned(primals_2)
        saved = copy_if_misaligned(saved)
        buf0 = {empty(10)}
        del primals_2
        del saved
        buf1 = {empty(20)}
        return (buf0, buf1)
    """
    assert peak(body, inputs={"saved": 40}, sizes={"primals_2": 10**6, "saved": 40}) == 4 * 30


def test_without_the_deletion_the_peak_is_higher():
    body = f"""
        buf0 = {empty(10)}
        buf1 = {empty(100)}
        buf2 = {empty(50)}
        return (buf1, buf2)
    """
    assert peak(body) == 4 * 160


@pytest.mark.parametrize(
    "reuse", ["buf1 = buf0; del buf0  # reuse", "buf1 = reinterpret_tensor(buf0, (5, 2), (2, 1), 0); del buf0"]
)
def test_reuse_allocates_nothing_and_keeps_the_storage(reuse):
    body = f"""
        buf0 = {empty(10)}
        {reuse}
        buf2 = {empty(3)}
        del buf1
        buf3 = {empty(10)}
        return (buf2, buf3)
    """
    assert peak(body) == 4 * 13


def test_a_storage_is_freed_with_its_last_name():
    body = f"""
        buf0 = {empty(10)}
        buf1 = reinterpret_tensor(buf0, (10,), (1,), 0)
        del buf0
        buf2 = {empty(100)}
        del buf1
        buf3 = {empty(7)}
    """
    assert peak(body) == 4 * 110


def test_rebinding_a_name_frees_what_it_held():
    body = f"""
        buf0 = {empty(10)}
        buf0 = {empty(20)}
        buf1 = {empty(100)}
    """
    assert peak(body) == 4 * 120


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


def test_inputs_count_until_they_are_deleted():
    body = f"""
        primals_1, addmm, tangents_1 = args
        args.clear()
        buf0 = {empty(10)}
        del addmm
        buf1 = {empty(100)}
    """
    assert peak(body, {"addmm": 1000}) == 1040
    assert peak(body, {"addmm": 100}) == 440


def test_held_inputs_are_never_freed():
    body = f"""
        addmm, tangents_1 = args
        del addmm
        buf0 = {empty(10)}
    """
    assert peak(body, {"addmm": 1000}) == 1000
    assert peak(body, {"addmm": 1000}, held=("addmm",)) == 1040


def test_an_input_reused_in_place_is_counted_once():
    body = f"""
        mul, tangents_1 = args
        buf0 = mul; del mul  # reuse
        buf1 = {empty(10)}
        del buf0
        buf2 = {empty(20)}
    """
    assert peak(body, {"mul": 100}) == 140


def test_extern_results_count_with_the_size_that_inductor_knows():
    body = """
        buf0 = extern_kernels.convolution(primals_1, primals_2, stride=(1, 1))
        assert_size_stride(buf0, (2, 3), (3, 1))
        buf1 = torch.ops.aten.topk.default(buf0, 2)
        del buf0
        buf2 = buf1[0]
        buf3 = buf1[1]
        del buf1
        del buf2
        buf4 = extern_kernels.convolution(buf3, primals_2)
    """
    assert peak(body, sizes={"buf0": 10, "buf2": 200, "buf3": 3000, "buf4": 1}) == 3210


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
        (f"empty_strided_cpu((2, 3), (3, 1), {FLOAT})", 24),
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


def test_a_size_with_a_symbol_is_asked_for():
    assert peak(f"buf0 = empty_strided_cpu((s0, 3), (3, 1), {FLOAT})", sizes={"buf0": 60}) == 60


def test_allocations_are_rounded_up():
    body = f"""
        buf0 = {empty(1)}
        buf1 = {empty(129)}
    """
    assert peak(body, {"mul": 513}, round_to=512) == 512 + 1024 + 1024


@pytest.mark.parametrize(
    "source",
    [
        "def partition_0(args):\n    pass\n\ndef call(args):\n    pass\n",  # a partition that is not called
        "def other(args):\n    pass\n",
        "",
    ],
)
def test_code_of_another_form_is_not_guessed_at(source):
    assert replay_peak(source, {"x": 1}, lambda _: 0) is None


def test_the_method_of_a_runner_is_found():
    source = f"class Runner:\n    def call(self, args):\n        buf0 = {empty(10)}\n        return (buf0,)\n"
    assert replay_peak(source, {}, lambda _: 0) == 40


def test_kernels_beside_the_call_do_not_count():
    source = f"def helper():\n    buf9 = {empty(999)}\n\ndef call(args):\n    buf0 = {empty(10)}\n"
    assert replay_peak(source, {}, lambda _: 0) == 40


@pytest.mark.parametrize(("strides", "copied"), [((512, 1, 32, 2), 0), ((512, 256, 16, 1), 4 * 4 * (512 + 512))])
@pytest.mark.parametrize("reused", [False, True])
def test_planar_images_are_copied_to_differentiate_their_convolution(strides, copied, reused):
    shape = f"(4, 2, 16, 16), {strides}"
    reuse = f"{empty(2048)}; buf0 = reinterpret_tensor(buf9, {shape}, 0); del buf9  # reuse"
    body = f"""
        {f"buf9 = {reuse}" if reused else f"buf0 = empty_strided_cpu({shape}, {FLOAT})"}
        buf1 = empty_strided_cpu((4, 2, 16, 16), (512, 1, 32, 2), {FLOAT})
        buf2 = torch.ops.aten.convolution_backward.default(buf1, buf0, primals_1, [0], (1, 1))
        return (buf2,)
    """
    needed = {"convolution_backward": {0: 100}}
    source = "def call(args):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    assert replay_peak(source, {}, lambda name: 0, workspaces=needed) == 2 * 4 * 4 * 512 + 100 + copied


def test_buffers_on_the_host_do_not_count_for_another_device():
    source = f"""
def call(args):
    buf0 = empty_strided_cuda((10,), (1,), {FLOAT})
    buf1 = {empty(100)}
    buf2 = buf1; del buf1  # reuse
    buf3 = empty_strided_cpu_pinned((100,), (1,), {FLOAT})
    buf4 = empty_strided_cuda((20,), (1,), {FLOAT})
"""
    assert replay_peak(source, {}, lambda _: 0, device_type="cuda") == 120
    assert replay_peak(source, {}, lambda _: 0) == 920


def test_the_result_of_a_kernel_that_is_renamed_counts_under_its_new_name():
    body = f"""
        buf0 = {empty(10)}
        buf1 = torch.ops.aten.kernel.default(buf0)
        del buf0
        buf2 = buf1
        del buf1
        buf3 = {empty(50)}
        return (buf2, buf3)
    """
    assert peak(body, sizes={"buf2": 400}) == 600
    assert peak(body, sizes={"buf1": 400}) == 600


def test_views_that_aten_makes_share_the_storage():
    body = f"""
        buf0 = {empty(10)}
        buf1 = torch.ops.aten.slice.Tensor(buf0, 0, 0, 5)
        buf2 = buf1
        del buf1
        del buf0
        buf3 = torch.ops.aten.view_as_real.default(buf2)
        buf4 = {empty(10)}
        return (buf3, buf4)
    """
    assert peak(body, sizes={"buf1": 20, "buf2": 20, "buf3": 20}) == 80


def test_a_copy_on_the_host_takes_no_memory_of_the_device_and_its_source_lives_to_the_wait():
    forward = f"""
        buf0 = {empty(100)}
        buf1 = torch.ops.autoremat.copy_to_host.default(buf0, 400)
        buf2 = {empty(10)}
        buf3 = torch.ops.autoremat.wait_for_copy_to_host.default(buf1, buf0)
        del buf0
        del buf1
        buf4 = {empty(30)}
        return (buf2, buf3, buf4)
    """
    assert peak(forward, sizes={"buf1": 400, "buf3": 400}) == 4 * 110


def test_a_copy_from_the_host_is_memory_of_the_device_from_its_begin_and_its_source_is_none():
    backward = f"""
        buf0 = torch.ops.autoremat.copy_from_host.default(kept, device(type='cpu'))
        buf1 = {empty(10)}
        buf2 = torch.ops.autoremat.wait_for_copy_from_host.default(buf0, kept)
        del buf0
        del kept
        buf3 = {empty(1)}
        del buf2
        buf4 = {empty(50)}
        return (buf1, buf3, buf4)
    """
    sizes = {"buf0": 400, "buf2": 400}
    assert peak(backward, inputs={"kept": 400}, sizes=sizes) == 4 * 111
    assert peak(backward.replace("del buf2", ""), inputs={"kept": 400}, sizes=sizes) == 4 * 161


def test_a_workspace_is_that_of_the_call_with_results_of_its_size():
    workspaces = {"kernel": {400: 1000, 4000: 9000}}

    def with_workspace(body: str) -> int | None:
        source = "def call(args):\n" + textwrap.indent(textwrap.dedent(body), "    ")
        return replay_peak(source, {}, lambda name: 400 if name == "buf1" else 0, workspaces=workspaces)

    renamed = "buf0 = torch.ops.aten.kernel.default(x)\nbuf1 = buf0\ndel buf0\nreturn (buf1,)"
    assert with_workspace(renamed) == 1400
    written = f"buf2 = {empty(100)}\nextern_kernels.kernel(x, out=buf2)\nreturn (buf2,)"
    assert with_workspace(written) == 1400
    in_place = "aten.kernel_(x)\nextern_kernels.kernel(x)\nreturn ()"  # nothing says which call it is
    assert with_workspace(in_place) == 9000


def test_a_workspace_is_that_of_the_node_whose_kernel_writes_the_buffer():
    workspaces, by_node = {"kernel": {400: 1000, 404: 9000}}, {"buf1": 10, "buf3": 9000, "buf4": 0}

    def peak_of(body: str) -> int | None:
        source = "def call(args):\n" + textwrap.indent(textwrap.dedent(body), "    ")
        sizes = {"buf1": 400, "buf4": 400}
        return replay_peak(source, {}, lambda name: sizes.get(name, 0), workspaces=workspaces, workspace_of=by_node.get)

    assert peak_of("buf1 = torch.ops.aten.kernel.default(x)\nreturn (buf1,)") == 410
    assert peak_of("buf4 = torch.ops.aten.kernel.default(x)\nreturn (buf4,)") == 400
    written = f"buf3 = {empty(100)}\nextern_kernels.kernel(x, out={{}})\nreturn (buf3,)"
    assert peak_of(written.format("buf3")) == 9400
    assert peak_of(written.format("reinterpret_tensor(buf3, (10, 10), (10, 1), 0)")) == 9400
    unknown = f"buf7 = {empty(100)}\nextern_kernels.kernel(x, out=buf7)\nreturn (buf7,)"
    assert peak_of(unknown) == 1400, "no node is known, so the size decides"


def test_the_workspace_of_a_nested_region_counts_where_no_other_op_has_one():
    source = "def call(args):\n    buf0 = [None] * 1\n    buf0 = region(region_args)\n    return (buf0[0],)"
    sizes = {"buf0": 400}
    assert replay_peak(source, {}, lambda name: sizes.get(name, 0), workspaces={}, workspace_of={"buf0": 100}.get) == 500


def test_a_copy_that_the_backward_waits_for_is_on_the_host_and_its_source_lives_to_the_wait():
    backward = f"""
        buf0 = {empty(10)}
        buf1 = torch.ops.autoremat.wait_for_copy_to_host.default(kept, saved)
        del saved
        del kept
        buf2 = {empty(20)}
        buf3 = torch.ops.autoremat.copy_from_host.default(buf1, device(type='cpu'))
        buf4 = torch.ops.autoremat.wait_for_copy_from_host.default(buf3, buf1)
        del buf3
        del buf1
        return (buf0, buf2, buf4)
    """
    sizes = {"buf1": 400, "buf3": 400, "buf4": 400}
    assert peak(backward, inputs={"kept": 400, "saved": 400}, sizes=sizes) == 4 * 130
    assert peak(backward.replace("del saved", ""), inputs={"kept": 400, "saved": 400}, sizes=sizes) == 4 * 230
