"""The replay of wrappers in C++, in the form that Inductor generates."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from wrapper_sources import replay_peak

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
