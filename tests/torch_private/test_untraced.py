"""Nothing of the package that runs in a step is traced by Dynamo, also where the user's step calls ``backward()`` itself."""

import ast
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from folders import ROOT
from layers import SOURCES
from torch import nn

import autoremat

OPTIONS = {"memory_budget": 1 << 20, "compiler": "aot_eager", "cost_model": "roofline"}
REGISTRATIONS = {
    "register_hook", "register_prehook", "queue_callback", "finalize", "register_optimizer_step_pre_hook",
    "register_module_forward_hook", "register_module_forward_pre_hook",
}  # fmt: skip
"""Calls by which torch or Python gets a callback."""


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 1))


def whole(compiled, model=None):
    model = model or net()

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return compiled(step)


def broken(compiled):
    model = net()

    def step(x):
        y = model(x)
        torch._dynamo.graph_break()
        loss = y.square().mean()
        loss.backward()
        return loss.detach()

    return compiled(step)


def nested(compiled):
    return whole(compiled, compiled(net()))


def gradient(compiled):
    model = net()

    def step(x):
        x.requires_grad_()
        y = model(x)
        torch._dynamo.graph_break()
        return torch.autograd.grad(y.sum(), x)[0].square().sum()

    return compiled(step)


def penalty(compiled):
    model = net()

    def loss(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().mean()

    function = compiled(loss)
    return lambda x: function(x).backward()


STEPS = (whole, broken, nested, gradient, penalty)


def outcome(step, backend: str, **options) -> str:
    """The result of a step, or its error's first line."""
    torch.compiler.reset()
    torch.manual_seed(0)
    try:
        result = step(lambda function: torch.compile(function, backend=backend, **options))(torch.randn(256, 16))
        return "trained" if result is None else format(float(result), ".6f")
    except Exception as error:
        return str(getattr(error, "inner_exception", error)).partition("\n")[0]


def watched_steps() -> list[str]:
    """Runs steps with each of the package's watches, and returns the frames of the package that Dynamo looked at."""
    seen = []
    for options in ({}, {"early_gradients": True, "hooks_free_gradients": True}, {"host_memory": "1MiB"}):
        torch.compiler.reset()
        model = net()
        if options.get("hooks_free_gradients"):
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        inside = torch.compile(model, backend="autoremat", options=OPTIONS | options)
        in_dynamo(inside)
        seen += frames_seen()
    torch.compiler.reset()
    model = net()
    autoremat.compile_blocks([model], memory_budget="1MiB", options={"compiler": "aot_eager"})
    for _ in range(3):
        in_dynamo(model)
    return [frame for frame in seen + frames_seen() if f"{ROOT}/autoremat/" in frame and not frame.startswith("_call_block ")]


def frames_seen() -> list[str]:
    """The frames that Dynamo has looked at since the last reset."""
    seen = list(torch._dynamo.eval_frame.dynamo_tls.traced_frame_infos)
    assert any(frame.startswith("rest ") for frame in seen)
    return seen


def in_dynamo(model: nn.Module) -> None:
    """Trains ``model`` once. Its backward and the optimizer's step run in frames that Dynamo looks at."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    outputs = model(torch.randn(256, 16))

    def rest():
        torch._dynamo.graph_break()
        outputs.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.compile(rest, backend="eager")()


def everything() -> dict[str, object]:
    warnings.simplefilter("ignore")
    outcomes = {s.__name__: (outcome(s, "aot_eager"), outcome(s, "autoremat", options=OPTIONS)) for s in STEPS}
    return {"outcomes": outcomes, "traced": watched_steps()}


def test_backwards_within_a_compiled_function_return_as_without_a_budget():
    code = (
        "import faulthandler, json; faulthandler.dump_traceback_later(500, exit=True)\n"
        "import test_untraced; print(json.dumps(test_untraced.everything()))"
    )
    own = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{own}:{own.parent}", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=540, cwd=ROOT, env=environment)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert {name: with_budget for name, (_, with_budget) in found["outcomes"].items()} == {
        name: plain for name, (plain, _) in found["outcomes"].items()
    }
    assert found["traced"] == []


def test_callbacks_are_registered_untraced():
    """Only the helpers of one file hand functions to torch and to Python, or what they hand over is untraced."""
    for module, path in SOURCES.items():
        if module == "torch_private.hooks":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(getattr(node, "func", None), "attr", None) or getattr(getattr(node, "func", None), "id", None)
            if isinstance(node, ast.Call) and name in REGISTRATIONS:
                assert any("untraced(" in ast.unparse(argument) for argument in node.args), f"{path}:{node.lineno}"
