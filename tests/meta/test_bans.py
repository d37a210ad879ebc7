"""What no module of bitport may do: hide errors, run data, touch the state of the process, name one vendor's device."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from .tree import dotted, imported, modules

PROCESS_WIDE_CALLS = {
    "torch.set_default_dtype",
    "torch.set_default_device",
    "torch.set_default_tensor_type",
    "torch.set_num_threads",
    "torch.set_num_interop_threads",
    "torch.set_float32_matmul_precision",
    "torch.use_deterministic_algorithms",
    "torch.manual_seed",
    "torch.seed",
    "random.seed",
    "numpy.random.seed",
    "np.random.seed",
    "logging.basicConfig",
    "warnings.simplefilter",
    "warnings.filterwarnings",
    "os.putenv",
    "os.environ.update",
    "os.environ.setdefault",
    "os.chdir",
    "sys.path.append",
    "sys.path.insert",
    "sys.setrecursionlimit",
}
FORK = "torch.random.fork_rng()"
PROCESS_WIDE_METHODS = {"addHandler", "setLevel"}
PROCESS_WIDE_ROOTS = ("torch.", "os.environ", "sys.path", "sys.modules", "warnings.", "logging.")
"""Assigning to anything below these changes every user of the process (torch._inductor.config, torch.backends, ...)."""

VENDORS = ("cuda", "xpu", "mps", "mtia", "hpu", "npu")

DESERIALIZERS = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def places(found: Iterator[ast.AST]) -> list[str]:
    return [f"line {getattr(node, 'lineno', '?')}: {ast.unparse(node).splitlines()[0]}" for node in found]


def calls(tree: ast.Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


@pytest.mark.parametrize("path", modules())
def test_no_error_is_swallowed(path: str) -> None:
    """A handler for everything is allowed only where it cleans up and raises again."""

    def swallowing() -> Iterator[ast.AST]:
        for node in ast.walk(modules()[path]):
            if isinstance(node, ast.ExceptHandler):
                kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                everything = any(kind is None or dotted(kind) in ("Exception", "BaseException") for kind in kinds)
                raises = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
                if everything and not raises:
                    yield node

    assert places(swallowing()) == []


@pytest.mark.parametrize("path", modules())
def test_no_process_wide_state_is_changed(path: str) -> None:
    """A seed may be set inside ``with torch.random.fork_rng()``, which puts the state back."""
    forks = (
        node
        for node in ast.walk(modules()[path])
        if isinstance(node, ast.With) and any(ast.unparse(item.context_expr) == FORK for item in node.items)
    )
    undone = {id(node) for fork in forks for node in ast.walk(fork)}

    def changing() -> Iterator[ast.AST]:
        for call in calls(modules()[path]):
            name = dotted(call.func)
            banned = name in PROCESS_WIDE_CALLS or name.rpartition(".")[2] in PROCESS_WIDE_METHODS
            if banned and id(call) not in undone:
                yield call
        for node in ast.walk(modules()[path]):
            targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else []
            targets = [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else targets
            for target in targets:
                name = dotted(target.value if isinstance(target, ast.Subscript) else target)
                if name.startswith(PROCESS_WIDE_ROOTS):
                    yield node

    assert places(changing()) == []


@pytest.mark.parametrize("path", modules())
def test_no_data_is_executed(path: str) -> None:
    tree = modules()[path]
    used = [f"line {line}: {name}" for name, line in imported(path, tree) if name.split(".")[0] in DESERIALIZERS]

    def executing() -> Iterator[ast.AST]:
        for call in calls(tree):
            name = dotted(call.func)
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            safe = isinstance(given.get("weights_only"), ast.Constant) and given["weights_only"].value is True  # type: ignore[attr-defined]
            if name in ("eval", "exec", "__import__", "os.system") or (name == "torch.load" and not safe):
                yield call

    assert used + places(executing()) == []


@pytest.mark.parametrize("path", modules())
def test_no_vendor_outside_its_backend(path: str) -> None:
    """``torch.cuda`` and the like live in that backend's folder; others ask ``torch.accelerator`` or a tensor."""
    vendors = {f"torch.{name}" for name in VENDORS if not path.startswith(f"backends/{name}/")}
    tree = modules()[path]
    used = [f"line {line}: {name}" for name, line in imported(path, tree) if name.startswith(tuple(vendors))]
    used += places(node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and dotted(node) in vendors)
    assert used == []


def test_the_bans_see_what_they_ban() -> None:
    """Each ban on a line that breaks it, so that a rule cannot rot unnoticed."""
    lines = ("torch._inductor.config.x = 1", "torch.cuda.is_available()", "try: f()", "except Exception: pass")
    tree = ast.parse("\n".join(lines))
    assign = next(node for node in ast.walk(tree) if isinstance(node, ast.Assign))
    assert dotted(assign.targets[0]).startswith(PROCESS_WIDE_ROOTS)
    assert [name for node in ast.walk(tree) if (name := dotted(node)) == "torch.cuda"]
    handler = next(node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler))
    assert handler.type is not None
    assert dotted(handler.type) == "Exception"
