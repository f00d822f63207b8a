"""Layers, calls of modules and cores of attention, on graphs written by hand, and policies as options."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from strategies import GraphBuilder, chain

from autoremat.basics.errors import ConstraintWarning, OptionsError
from autoremat.planner.constraints import policies
from autoremat.planner.constraints.model_structure import Forward
from autoremat.planner.constraints.policies import Block, Full, Region, Segments, Selective, Sqrt, Uniform, grouped
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Role, Scope


def forward_of(*modules: tuple[Scope, ...] | str, **fields: object) -> Forward:
    """A chain with one op for each element: the modules that run, as scopes or as one path "a.0/Class"."""
    build = GraphBuilder()
    made = [build.source(0)]
    for running in modules:
        if isinstance(running, str):
            path, _, kind = running.partition("/")
            running = (Scope(path, kind),) if path else ()
        made.append(build.op([made[-1]], 8, scopes=running, **fields))
    gradient = build.source(0, Role.TANGENT)
    for value in reversed(made):
        gradient = build.op([gradient, value], 8, forward=False)
    return Forward(build.graph(backward_outputs=(gradient,)))


def test_layers_are_the_numbered_children_of_one_class():
    forward = forward_of(
        "embed/Embedding", "layers.0/Block", "layers.0/Block", "layers.1/Block", "layers.2/Block", "head/Linear"
    )
    assert forward.layers == ((1, 2), (3,), (4,))


def test_the_outermost_layers_count():
    block, other = Scope("layers.0", "Block"), Scope("layers.1", "Block")
    experts = [Scope(f"layers.{layer}.experts.{n}", "Mlp") for layer in (0, 1) for n in (0, 1)]
    forward = forward_of((block,), (block, experts[0]), (block, experts[1]), (other, experts[2]), (other, experts[3]))
    assert forward.layers == ((0, 1, 2), (3, 4))


def test_a_layer_that_runs_again_is_another_layer():
    calls = [(Scope("group.0", "Block", call),) for call in range(3) for _ in range(2)]
    assert forward_of(*calls).layers == ((0, 1), (2, 3), (4, 5))


def test_ops_without_a_module_belong_to_those_around_them():
    outer = Scope("layers.0", "Block")
    forward = forward_of(
        (outer, Scope("layers.0.a", "A")), (), (outer, Scope("layers.0.b", "B")), (), (Scope("layers.1", "Block"),)
    )
    assert forward.scopes[1] == (outer,)
    assert forward.scopes[3] == ()
    assert forward.layers == ((0, 1, 2), (4,))


def attention(fused: bool = False) -> Graph:
    build = GraphBuilder()
    x = build.source(8)

    def op(target: str, *inputs: int, **fields: object) -> int:
        value = build.op(inputs, 8, **fields)
        build.ops[-1] = type(build.ops[-1])(**{**vars(build.ops[-1]), "target": target})
        return value

    q, k, v = (op("aten.addmm.default", x, flops=1) for _ in range(3))
    v = op("aten.add.Tensor", v)
    if fused:
        out = op("aten._scaled_dot_product_flash_attention_for_cpu.default", q, k, v, flops=1)
    else:
        scores = op("aten.bmm.default", q, k, flops=1)
        highest = op("aten.amax.default", scores, decomposed_from="aten._softmax.default")
        weights = op("aten.exp.default", scores, highest, decomposed_from="aten._softmax.default")
        out = op("aten.bmm.default", op("aten.mul.Tensor", weights), v, flops=1)
    last = op("aten.addmm.default", out, flops=1)
    gradient = build.op([build.source(8, Role.TANGENT), last], 8, forward=False)
    return build.graph(backward_outputs=(gradient,))


def test_the_core_of_attention_reaches_from_product_to_product():
    assert Forward(attention()).attention_cores == ((4, 5, 6, 7, 8),)
    assert Forward(attention(fused=True)).attention_cores == ((4,),)
    assert Forward(chain(4)).attention_cores == ()


SIX = [f"layers.{i // 2}/Block" for i in range(12)]


def numbers(regions: list[Region]) -> list[tuple[int, ...]]:
    return [region.ops for region in regions]


def test_policies_over_layers():
    forward = forward_of("embed/E", *SIX, "head/H")
    pairs = [(1, 2), (3, 4), (5, 6), (7, 8), (9, 10), (11, 12)]
    assert numbers(Full()(forward)) == pairs
    assert numbers(Uniform(1)(forward)) == pairs
    assert numbers(Uniform(4)(forward)) == [tuple(range(1, 9)), tuple(range(9, 13))]
    assert numbers(Block(2)(forward)) == pairs[:2]
    assert numbers(Block(20)(forward)) == pairs


def test_the_ops_between_the_layers_of_a_group_belong_to_it():
    assert numbers(grouped(((0, 1), (3, 4), (6, 7)), 2)) == [(0, 1, 2, 3, 4), (6, 7)]


def test_segments_are_stretches_of_the_whole_forward_but_the_last():
    forward = forward_of("embed/E", *SIX, "head/H")
    for policy, count in ((Segments(4), 4), (Sqrt(), 2), (Segments(1), 1)):
        regions = numbers(policy(forward))
        assert len(regions) == count - 1
        assert [op for ops in regions for op in ops] == list(range(sum(map(len, regions))))


def test_megatrons_names():
    layer = Scope("layers.0", "MixtralDecoderLayer")
    mixture, experts = Scope("layers.0.mlp", "SparseMoeBlock"), Scope("layers.0.mlp.experts", "Experts")
    running = [
        (layer, Scope("layers.0.input_layernorm", "MixtralRMSNorm")),
        (layer, Scope("layers.0.self_attn", "Attention"), Scope("layers.0.self_attn.q_b_proj", "Linear")),
        (layer, Scope("layers.0.self_attn", "Attention"), Scope("layers.0.self_attn.core_attention", "CoreAttention")),
        (layer, mixture, Scope("layers.0.mlp.gate", "Router")),
        (layer, mixture, experts, Scope("layers.0.mlp.experts.act_fn", "SiLU")),
        (layer, mixture, Scope("layers.0.mlp.shared_expert", "Mlp")),
        (Scope("layers.1", "DecoderLayer"), Scope("layers.1.mlp", "Mlp"), Scope("layers.1.mlp.act_fn", "SiLU")),
    ]
    forward = forward_of(*running)
    expected = {
        "layernorm": [Region((0,), True)], "mla_up_proj": [Region((1,), True)], "core_attn": [Region((2,))],
        "moe": [Region((3, 4, 5))], "moe_act": [Region((4,), True)], "shared_experts": [Region((5,))],
        "mlp": [Region((5,)), Region((6,))], "layers.1.*": [Region((6,))], "*.mlp": [Region((3, 4, 5)), Region((6,))],
    }  # fmt: skip
    for name, regions in expected.items():
        assert Selective((name,))(forward) == regions, name
    with pytest.warns(ConstraintWarning, match=r"'layers\.\*\.mpl' matches no module .* nearest: 'layers\.\*\.mlp'"):
        assert Selective(("layers.*.mpl",))(forward) == []


@dataclass(frozen=True)
class Odd:
    """The layers with odd numbers."""

    def __call__(self, forward: Forward) -> Sequence[Region]:
        return [Region(layer) for layer in forward.layers[1::2]]


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("full", policies.Full()), ("uniform:3", policies.Uniform(3)), ("selective", policies.Selective()),
        ("selective:mlp, *.norm1", policies.Selective(("mlp", "*.norm1"))), ("none", None), (Odd(), Odd()),
    ],
)  # fmt: skip
def test_policies_may_be_written_as_text(text, policy):
    assert policies.parse(text) == policy


@pytest.mark.parametrize("value", ["ful", "uniform", "uniform:0", "full:1", "block:-1", 3, Odd, "selective:atention"])
def test_anything_else_is_refused(value):
    with pytest.raises(OptionsError, match="is not accepted"):
        policies.parse(value)


def test_a_policy_is_told_from_every_other():
    everything = [policies.Full(), policies.Sqrt(), policies.Uniform(2), policies.Uniform(3), policies.Block(2), Odd()]
    identities = [str(policies.identity(policy)) for policy in everything]
    assert len(set(identities)) == len(everything)
    assert policies.identity(Odd()) == policies.identity(Odd())
    number = 3
    with pytest.raises(OptionsError, match="caches must tell it from others"):
        policies.parse(lambda forward: [Region(forward.layers[number])])
