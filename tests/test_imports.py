"""The rooms of the project, who may import whom, and how long a file and a function may be, read from the sources."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "stretto"
BASE = {"types", "errors", "extras", "host_memory", "hub", "plugins", "plugin_kinds", "readings", "recipe.schema"}
BASE |= {"algorithms.catalog"}
"""Everyone may import these."""
EVERYTHING = {path.stem for path in ROOT.iterdir()} - {"api", "bench", "cli", "__main__"}
MODEL_FACTS = {f"models.{name}" for name in ("source", "plausible", "gguf_header", "adapter_folder", "size")}
"""What a model's files say, read without PyTorch."""

ARROWS = {
    "__init__": {"types", "errors", "openmp", "api", "recipe.schema", "runtime.user_functions"},
    "__main__": {"cli.main"},
    "types": set(),
    "errors": set(),
    "extras": {"errors"},
    "hub": {"errors"},
    "plugins": {"errors", "plugin_kinds", "recipe.schema", "sandbox", "threads"},
    "plugin_kinds": {"sandbox"},
    "threads": {"errors"},
    "host_memory": set(),
    "readings": set(),
    "openmp": set(),
    "recipe": BASE | {"checks.rules", "placement.strategies"},
    "checks": BASE
    | {
        "algorithms.base",
        "algorithms.own_facts",
        "engines.served",  # what a server of the user's says of itself
        "environments",
        "kernels.cpu.compiler",  # whether it works on this machine
        "models",
        "openmp",
        "placement",
        "recipe",
        "rewards",
        "sandbox",  # what it protects on this machine
        "tasks",
        "threads",
    },
    "algorithms": BASE | {"sandbox"},
    "sandbox": BASE,
    "weights": BASE,
    # A report reads what a run wrote, and writes a page whole.
    "report": BASE | {"recipe.yaml_io", "storage.atomic", "storage.json_lines", "storage.lock", "storage.pass_rates"},
    "storage": BASE,
    "placement": BASE | {"recipe.yaml_io"},
    "scheduler": {"types", "errors", "placement"},
    # What the native engine lets in together is what is priced.
    # Whether a cut goes through moments that share a scale follows from sizes.
    "planner": BASE | MODEL_FACTS | {"placement", "scheduler", "engines.native.admission", "training.narrow_blocks"},
    "tasks": BASE | {"sandbox"},
    "rewards": BASE | {"sandbox"},
    "environments": BASE | {"sandbox", "engines.base", "threads"},
    "models": BASE | {"kernels", "recipe.validation_errors"},
    "kernels": BASE | {"models"},
    "engines": BASE | {"models", "storage.lock", "training.packing"},
    "training": BASE | {"algorithms", "kernels", "models", "weights"},
    "workers": BASE
    | {"algorithms.base", "checks.machine", "engines", "models", "openmp"}
    | {"placement.devices", "placement.plan", "placement.transport"}
    | {"threads", "training", "weights"}
    # A checkpoint's tensors are written where they are.
    | {"storage.atomic", "storage.manifest", "storage.tensors"},
    # Neither strategies by name, nor Ray, nor how a model is cut: one device and several run alike.
    "runtime": BASE
    | {"algorithms.base", "algorithms.credit", "algorithms.optimal", "algorithms.own_facts", "algorithms.sft"}
    | {"checks.machine"}
    | {"checks.own_code", "engines.base", "engines.queue", "environments", "models.files", "models.load"}
    | {"models.memory", "models.source", "models.stop_tokens", "models.template_file", "openmp", "placement.build"}
    | {"placement.cluster", "placement.devices", "placement.plan", "placement.strategies", "planner", "recipe"}
    | {"report", "rewards"}
    | {"sandbox.fork_server", "sandbox.imports", "sandbox.pool", "scheduler", "storage", "tasks.examples"}
    | {"tasks.source", "tasks.template", "threads", "training.optimizer", "training.trainer"}
    | {"workers.checkpoints", "workers.deadlines", "workers.launchers.inprocess", "workers.models"}
    | {"workers.scatter_gather", "workers.worker_group", "workers.worker_spec"}
    # A replay compares with a state that several devices may hold together.
    | {"training.parallel.zero1"},
    "bench": BASE
    | {"algorithms.base", "algorithms.optimal", "engines.base", "engines.native.engine", "engines.queue"}
    | {"checks.machine", "environments.render", "environments.trajectory", "models.load", "models.logprob_head"}
    | {"models.memory", "models.scratch", "models.source", "placement.build", "placement.cluster", "placement.devices"}
    | {"placement.plan", "placement.rates", "report.chart", "storage.json_lines"}
    | {"placement.strategies", "planner", "recipe.describe", "rewards.answer", "rewards.combine", "runtime"}
    | {"scheduler.asyncio_driver", "scheduler.speed_estimator", "storage.manifest", "tasks.source", "threads"}
    | {"training.packing", "training.whitening", "workers.api", "workers.launchers.inprocess", "workers.models"}
    | {"workers.stacks", "workers.vllm", "workers.worker", "workers.worker_group", "workers.worker_spec"}
    # What a publish sends is counted where it passes.
    | {"engines.apart", "engines.vllm.engine", "weights.carrier"},
    "deploy": BASE | {"placement", "storage.atomic"},
    "export": BASE
    | {"engines.base", "engines.native.engine", "environments.base", "environments.chat", "environments.render"}
    | {"models", "recipe", "runtime.answers", "runtime.build", "runtime.inputs", "runtime.moved"}
    | {"runtime.reading", "runtime.recipe_file", "storage", "workers.models"},
    "api": EVERYTHING | {"api", "bench"},
    "cli": EVERYTHING | {"api", "bench", "cli"},
}
"""What each room may import besides itself."""

FILES = {
    "recipe.schema": {"recipe.schema"},
    "algorithms.catalog": {"errors"},
    **dict.fromkeys(MODEL_FACTS, BASE | MODEL_FACTS | {"recipe.validation_errors"}),
    # A frozen model that says one number for a sequence is given the rows that a trainer packs.
    "models.scalar_head": BASE | {"models", "training.packing", "training.rows"},
    "engines.native.admission": BASE | {"engines.base"},
    "training.narrow_blocks": BASE,
    # Ways to decode belong to the native engine, whose cache and steps they work on.
    # Decode steps say what of the weights they read, and whether a copy still is them.
    "engines.native.decode_backend": BASE | {"engines", "kernels", "models", "weights.tensors"},
    "engines.native.layout": BASE | {"engines", "kernels", "models"},
    # A rank of a lane has parts of its own, and says whether they are those of the whole.
    "engines.native.lane": BASE | {"engines", "models", "weights.tensors"},
    "kernels.cpu.packed_linear": BASE | {"kernels", "models", "engines.native", "weights.tensors"},
    # Its threads are to be those of torch.
    "kernels.cpu.library": BASE | {"kernels", "openmp"},
    "kernels.cuda.decode_graphs": BASE | {"kernels", "models", "engines.native"},
    "engines.native.engine": BASE | {"engines", "models", "kernels", "training.packing"},
    # An engine with weights of its own says itself where they are not those that were published.
    "engines.apart": BASE | {"engines", "models", "weights"},
    "engines.vllm.engine": BASE | {"engines", "models", "weights"},
    "engines.served.engine": BASE | {"engines", "models", "weights"},
    "engines.vllm.published": BASE | {"engines", "models", "weights"},
    # It runs in the engine's own Python, which has nothing of the project.
    "engines.vllm.host": set(),
    "engines.vllm.engine_args": set(),
    "engines.vllm.rank_failures": set(),
    "engines.vllm.tensor_file": set(),
    # A taskset has both the prompts and the environment that plays them.
    "tasks.verifiers": BASE | {"sandbox", "environments.verifiers.tasksets"},
    # The queue of a cell counts the trajectories that wait for its engine.
    "engines.queue": BASE | {"engines", "environments.trajectory"},
}
"""Files with arrows of their own: fewer, or more, and why."""

TORCH_FREE = (
    "api",
    "types",
    "errors",
    "extras",
    "threads",
    "openmp",
    "host_memory",
    "hub",
    "plugins",
    "plugin_kinds",
    "readings",
    "recipe",
    "tasks",
    "environments",
    "rewards",
    "sandbox",
    "placement",
    "scheduler",
    "planner",
    "report",
    "deploy",
)
TORCH_FREE_FILES = (
    "__init__",
    "algorithms.catalog",
    "algorithms.own_facts",
    "checks.doctor",
    "checks.machine",
    "checks.recipe",
    "checks.rules",
    "engines.base",
    "engines.native.admission",
    "engines.scripted",
    "engines.served.http_calls",
    "engines.served.server_api",
    "engines.served.sglang_api",
    "engines.served.transport",
    "engines.served.vllm_api",
    "runtime.explain_run",
    "runtime.live_page",
    "runtime.recipe_changes",
    "runtime.recipe_file",
    "runtime.user_functions",
    "runtime.value_table",
    "training.narrow_blocks",
    *MODEL_FACTS,
)
IMPORTS = (ast.Import, ast.ImportFrom)

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


@cache
def parse(module):
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def beyond_its_room(module):
    """What a module imports that it may not."""
    room = module.partition(".")[0]
    own = (arrows for file, arrows in FILES.items() if within(module, [file]))
    allowed = next(own, ARROWS[room] | {room})
    inner = [name.removeprefix("stretto.") for name in imports(parse(module)) if within(name, ["stretto", ""])]
    return [name for name in inner if not within(name, allowed | {"__version__"})]


def test_a_module_imports_only_what_its_room_may():
    assert {module: names for module in MODULES if (names := beyond_its_room(module))} == {}


def test_every_arrow_of_the_rooms_above_all_others_is_used():
    """What a room may import and does not is no arrow. Ray is known where the launcher is chosen, and nowhere else."""
    named = {module: set(imports(parse(module))) for module in MODULES}
    for room in ("runtime", "bench"):
        used = set().union(*(names for module, names in named.items() if within(module, [room])))
        assert [a for a in sorted(ARROWS[room] - BASE) if not any(within(n, [f"stretto.{a}"]) for n in used)] == []
    ray = [
        module for module, names in named.items() if any(within(n, ["stretto.workers.launchers.ray"]) for n in names)
    ]
    assert ray == ["workers.launchers.inprocess"], "where the launcher is chosen"


def while_loading(tree):
    """The statements that run when a file is imported: none inside of functions or for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield node
            yield from while_loading(node)


def file_of(name):
    """The file that an imported name is in, or none of ours."""
    parts = name.split(".")[1:] if within(name, ["stretto"]) else []
    for end in range(len(parts), 0, -1):
        for module in (".".join(parts[:end]), ".".join([*parts[:end], "__init__"])):
            if module in MODULES:
                return module
    return None


def circle(graph):
    """Files that load each other in a circle, or none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_no_files_import_each_other_in_a_circle():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    graph = {}
    for module in MODULES:
        tree = ast.Module(body=[node for node in while_loading(parse(module)) if isinstance(node, IMPORTS)])
        graph[module] = {file for name in imports(tree) if (file := file_of(name)) not in (None, module)}
    assert "planner.candidate" in graph["planner.search"] and "placement.strategies" in graph["planner.candidate"]
    assert circle(graph) is None


def heavy_imports(module):
    """What a module imports of what takes seconds to load."""
    tree = parse(module)
    if module.startswith(
        ("report.", "environments.template_worker", "environments.toolset")
    ):  # a report may load it when it is asked for, never by being imported
        kept = [node for node in tree.body if not isinstance(node, (ast.ClassDef, ast.FunctionDef))]
        tree = ast.Module(body=kept, type_ignores=[])
    return [name for name in imports(tree) if within(name, ["torch", "transformers", "peft", "accelerate"])]


def test_a_room_without_torch_imports_none():
    rooms = [module for module in MODULES if within(module, TORCH_FREE + TORCH_FREE_FILES)]
    assert {module: names for module in rooms if (names := heavy_imports(module))} == {}


HOMES = {
    "vllm": ("engines.vllm.host", "engines.vllm.host_tensors"),  # the processes of vLLM's own Python
    "ray": ("workers.launchers.ray",),
    "datasets": ("tasks.hf",),
    "bitsandbytes": ("models.few_bits",),
    "math_verify": ("rewards.expression",),
}
"""Library -> the files that may import it."""


def test_a_heavy_library_is_imported_in_its_own_place_only():
    used = {(name.partition(".")[0], module) for module in MODULES for name in imports(parse(module))}
    peers = "bench.peer_"  # other projects, measured with what they use, in environments of their own
    astray = [(library, module) for library, module in used if module not in HOMES.get(library, (module,))]
    assert [pair for pair in astray if not pair[1].startswith(peers)] == []


def test_no_two_classes_have_one_name():
    places = {}
    for module in MODULES:
        for name in (node.name for node in ast.walk(parse(module)) if isinstance(node, ast.ClassDef)):
            places.setdefault(name, []).append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


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
