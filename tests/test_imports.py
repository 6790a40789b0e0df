"""The rooms of the project, who may import whom, and how long a file and a function may be, read from the sources."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "stretto"
BASE = {"types", "errors", "extras", "config.schema", "algorithms.catalog"}
"""Everyone may import these."""
EVERYTHING = {path.stem for path in ROOT.iterdir()} - {"cli", "__main__"}

ARROWS = {
    "__init__": {"types", "errors"},
    "__main__": {"cli.main"},
    "types": set(),
    "errors": set(),
    "extras": {"errors"},
    "threads": set(),
    "config": BASE,
    "algorithms": BASE,
    "sandbox": BASE,
    "weights": BASE,
    "report": BASE,
    "placement": BASE | {"config.document", "config.plausible"},
    "step": {"types", "errors", "placement"},
    "planner": BASE | {"config.gguf", "config.locate", "config.plausible", "placement", "step"},
    "tasks": BASE | {"sandbox"},
    "environments": BASE | {"sandbox"},
    "rewards": BASE | {"sandbox"},
    "rollout": BASE | {"environments.base", "sandbox.pool"},
    "train": BASE | {"algorithms", "weights", "config.locate", "config.plausible"},
    "execution": BASE
    | {
        "algorithms.base",
        "config.locate",
        "config.size",
        "environments",
        "placement",
        "rewards",
        "rollout",
        "sandbox",
        "step",
        "threads",
        "train",
        "weights",
    },
    "run": EVERYTHING - {"bench"},
    "bench": EVERYTHING,
    "cli": EVERYTHING | {"cli"},
}
"""What each room may import besides itself."""

FILES = {
    "config.schema": set(),
    "algorithms.catalog": set(),
    "rollout.native": BASE
    | {"rollout", "train.model", "train.attention", "train.head", "train.memory", "train.packing"},
    "rollout.apart": BASE | {"rollout", "train.apart", "train.model"},
    "rollout.packed": BASE | {"rollout", "train.attention", "train.backward", "train.model"},
    "rollout.steps": BASE | {"rollout", "train.attention", "train.model"},
    "rollout.written": BASE | {"rollout", "train.attention"},
    "rollout.graphs": BASE | {"rollout", "train.model"},
    "rollout.sampling": BASE | {"rollout", "train.head"},
    "rollout.cache": BASE | {"rollout", "train.head", "train.model"},
    "rollout.prefill": BASE | {"rollout", "train.attention", "train.model", "train.packing"},
    "rollout.recordings": BASE | {"rollout", "train.memory"},
}
"""Files with arrows of their own: fewer, or more for the engine that runs on the very modules that are trained."""

TORCH_FREE = (
    "types",
    "errors",
    "extras",
    "threads",
    "config",
    "tasks",
    "environments",
    "rewards",
    "sandbox",
    "placement",
    "step",
    "planner",
    "report",
)
TORCH_FREE_FILES = (
    "__init__",
    "algorithms.catalog",
    "execution.checks",
    "execution.doctor",
    "execution.launcher",
    *(f"rollout.{name}" for name in ("base", "collect", "model_handle", "render", "scripted", "templates")),
)
LONG = {"config.schema"}
"""Files that are lists of facts rather than code."""

MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(ROOT.rglob("*.py"))}


def imports(tree):
    """Every name imported anywhere in a tree, written out in full."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names)


def within(name, prefixes):
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def parse(module):
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_its_room_may(module):
    room = module.partition(".")[0]
    allowed = FILES.get(module, ARROWS[room] | {room})
    inner = [name.removeprefix("stretto.") for name in imports(parse(module)) if within(name, ["stretto", ""])]
    assert [name for name in inner if not within(name, allowed | {"__version__"})] == []


@pytest.mark.parametrize("module", [module for module in MODULES if within(module, TORCH_FREE + TORCH_FREE_FILES)])
def test_a_room_without_torch_imports_none(module):
    tree = parse(module)
    if module.startswith("report."):  # a report may load it when it is asked for, never by being imported
        tree.body = [node for node in tree.body if not isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    assert [name for name in imports(tree) if within(name, ["torch", "transformers", "peft", "accelerate"])] == []


@pytest.mark.parametrize(
    ("library", "home"),
    [
        ("vllm", "rollout.vllm"),
        ("ray", "execution.ray"),
        ("datasets", "tasks.hf"),
        ("bitsandbytes", "train.optim"),
        ("math_verify", "rewards.expression"),
    ],
)
def test_a_heavy_library_is_imported_in_one_file_only(library, home):
    users = [module for module in MODULES if any(within(name, [library]) for name in imports(parse(module)))]
    peers = "bench.peer_"  # other projects, measured with what they use, in environments of their own
    assert [module for module in users if module != home and not module.startswith(peers)] == []


@pytest.mark.parametrize("module", MODULES)
def test_files_and_functions_stay_short(module):
    lines = MODULES[module].read_text(encoding="utf-8").count("\n")
    assert lines <= 350 or module in LONG
    functions = [node for node in ast.walk(parse(module)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    assert {node.name: size for node in functions if (size := node.end_lineno - node.lineno + 1) > 60} == {}


def test_every_room_has_its_arrows():
    assert {module.partition(".")[0] for module in MODULES} == set(ARROWS)


def test_text_is_read_and_written_in_an_encoding_of_ours_and_not_of_the_locale():
    calls = [(name, node) for name in MODULES for node in ast.walk(parse(name)) if isinstance(node, ast.Call)]
    assert [f"{module}, line {call.lineno}" for module, call in calls if _leaves_encoding_open(call)] == []


def _leaves_encoding_open(call):
    """True for calls that read or write text without saying how it is encoded."""
    method = isinstance(call.func, ast.Attribute)
    name = call.func.attr if method else getattr(call.func, "id", "")
    owner = getattr(call.func.value, "id", "") if method else ""
    words = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    named = {keyword.arg for keyword in call.keywords}
    if "encoding" in named or {"utf-8", "ascii"} & set(words):
        return False
    if name in ("run", "Popen", "check_output") and "text" in named:
        return True
    if name in ("open", "fdopen"):
        a_file = name == "fdopen" or not method or (owner != "os" and (words or "mode" in named or "errors" in named))
        return bool(a_file) and not any("b" in word and len(word) <= 3 for word in words)
    return method and name in ("read_text", "write_text")
