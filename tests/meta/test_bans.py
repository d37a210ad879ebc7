"""What no module of bitport may do: hide errors, run data, touch the state of the process, name one vendor's device."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

import pytest

from .tree import dotted, imported, modules

Finder = Callable[[str, ast.Module], Iterator[ast.AST]]

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
PROCESS_WIDE_METHODS = {"addHandler", "setLevel"}
PROCESS_WIDE_ROOTS = ("torch.", "os.environ", "sys.path", "sys.modules", "warnings.", "logging.")
"""Assigning to anything below these changes every user of the process (torch._inductor.config, torch.backends, ...)."""

RESTORED = {
    "torch.random.fork_rng": "torch.manual_seed",
    "random_apart": "torch.manual_seed",
    "warnings.catch_warnings": "warnings.",
}
"""What may change inside ``with`` such a call, since that restores it."""
VENDORS = ("cuda", "xpu", "mps", "mtia", "hpu", "npu")
DESERIALIZERS = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def swallowed_errors(path: str, tree: ast.Module) -> Iterator[ast.AST]:
    """Find catch-all handlers, except those that clean up and re-raise."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            everything = any(kind is None or dotted(kind) in ("Exception", "BaseException") for kind in kinds)
            raises = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if everything and not raises:
                yield node


def restored(node: ast.With) -> tuple[str, ...]:
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    return tuple(RESTORED[name] for name in map(dotted, (call.func for call in calls)) if name in RESTORED)


def process_wide_changes(path: str, tree: ast.Module) -> Iterator[ast.AST]:
    """Find process-wide changes that nothing undoes."""
    undone = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.With)
        for node in ast.walk(block)
        if any(name.startswith(restored(block)) for name in changed(node))
    }
    for node in ast.walk(tree):
        if id(node) not in undone and any(changed(node)):
            yield node


def changed(node: ast.AST) -> Iterator[str]:
    """What the node changes in the whole process."""
    if isinstance(node, ast.Call):
        name = dotted(node.func)
        if name in PROCESS_WIDE_CALLS or name.rpartition(".")[2] in PROCESS_WIDE_METHODS:
            yield name
    targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else []
    targets = [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else targets
    for target in targets:
        name = dotted(target.value if isinstance(target, ast.Subscript) else target)
        if name.startswith(PROCESS_WIDE_ROOTS):
            yield name


def executed_data(path: str, tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [name for name, _ in imported(path, ast.Module([node], []))]
            if any(name.split(".")[0] in DESERIALIZERS for name in names):
                yield node
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            unsafe_load = name == "torch.load" and given.get("weights_only") != "True"
            if name in ("eval", "exec", "__import__", "os.system") or unsafe_load:
                yield node


def vendors(path: str, tree: ast.Module) -> Iterator[ast.AST]:
    """``torch.cuda`` and the like live in that backend's folder; others ask ``torch.accelerator`` or a tensor."""
    banned = {f"torch.{name}" for name in VENDORS if not path.startswith(f"backends/{name}/")}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [name for name, _ in imported(path, ast.Module([node], []))]
            if any(name.startswith(tuple(banned)) for name in names):
                yield node
        if isinstance(node, ast.Attribute) and dotted(node) in banned:
            yield node


BANS: dict[Finder, tuple[str, ...]] = {
    swallowed_errors: (
        "try: f()\nexcept Exception: pass",
        "try: f()\nexcept: return_nothing()",
        "try: f()\nexcept (ValueError, BaseException) as error: log(error)",
    ),
    process_wide_changes: (
        "torch._inductor.config.freezing = True",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.set_num_threads(1)",
        "os.environ['X'] = '1'",
        "log.addHandler(handler)",
        "torch.manual_seed(0)",
        "warnings.showwarning = show",
        "with torch.random.fork_rng():\n  torch.set_num_threads(1)",
    ),
    executed_data: (
        "import pickle",
        "from dill import loads",
        "eval(text)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
    ),
    vendors: ("torch.cuda.is_available()", "from torch.xpu import device_count", "import torch.cuda"),
}
"""Each rule, and lines that break it."""

ALLOWED: dict[Finder, tuple[str, ...]] = {
    swallowed_errors: ("try: f()\nexcept ValueError: pass", "try: f()\nexcept BaseException:\n  undo()\n  raise"),
    process_wide_changes: (
        "with torch.random.fork_rng():\n  torch.manual_seed(0)",
        "with warnings.catch_warnings():\n  warnings.showwarning = show",
        "self.torch.x = 1",
        "config = 1",
    ),
    executed_data: ("model.eval()", "torch.load(f, weights_only=True)"),
    vendors: ("torch.accelerator.is_available()", "tensor.cuda"),
}


def rules(examples: dict[Finder, tuple[str, ...]]) -> list[object]:
    return [
        pytest.param(find, line, id=f"{find.__name__}-{line}") for find, lines in examples.items() for line in lines
    ]


@pytest.mark.parametrize("find", BANS, ids=lambda find: find.__name__)
def test_no_module_does_it(find: Finder) -> None:
    broken = [
        f"{path}:{getattr(node, 'lineno', '?')}: {ast.unparse(node).splitlines()[0]}"
        for path, tree in modules().items()
        for node in find(path, tree)
    ]
    assert broken == []


@pytest.mark.parametrize(("find", "line"), rules(BANS))
def test_a_rule_sees_what_it_bans(find: Finder, line: str) -> None:
    assert list(find("ops/some.py", ast.parse(line)))


@pytest.mark.parametrize(("find", "line"), rules(ALLOWED))
def test_a_rule_bans_no_more(find: Finder, line: str) -> None:
    assert list(find("ops/some.py", ast.parse(line))) == []


def test_a_backend_may_name_its_own_device() -> None:
    tree = ast.parse("torch.cuda.get_device_capability(device)")
    assert list(vendors("backends/cuda/capability.py", tree)) == []
    assert list(vendors("backends/xpu/capability.py", tree))
