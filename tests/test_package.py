"""What the package promises as a whole: quick, lazy, and with imports that point one way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dpbnn

pytestmark = pytest.mark.long

SOURCE = Path(dpbnn.__file__).parent

# A room may import itself and the rooms named after it.
BELOW = {
    "privacy": {"notebook"},
    "calibration": {"privacy", "contributions", "messages", "predictive"},
    "contributions": {"privacy", "likelihoods", "messages", "networks"},
    "data": {"privacy", "contributions", "messages", "units"},
    "evaluation": {"likelihoods", "messages", "notebook", "predictive"},
    "likelihoods": {"predictive"},
    "messages": set(),
    "notebook": set(),
    "mixtures": {"messages", "networks"},
    "networks": {"privacy"},
    "predictive": set(),
    "priors": set(),
    "report": {"privacy", "predictive", "storage", ""},
    "storage": {"privacy", "", "__version__"},
    "posteriors": {
        "messages",
        "notebook",
        "predictive",
        "likelihoods",
        "mixtures",
        "networks",
        "storage",
        "",
    },
    "moments": {"contributions", "likelihoods", "mixtures", "posteriors", "priors"},
    "methods": {
        "privacy",
        "contributions",
        "likelihoods",
        "mixtures",
        "moments",
        "networks",
        "priors",
        "posteriors",
    },
    "units": {"messages"},
    "sources": {"messages", "privacy"},
    "bad_rows": {"messages", "privacy", "likelihoods", "networks", "sources", ""},
    "rows": {"bad_rows", "messages", "likelihoods", "sources", "units"},
    "neighbours": {"likelihoods", "units"},
    "audit": {
        "likelihoods",
        "methods",
        "neighbours",
        "posteriors",
        "priors",
        "privacy",
        "sources",
        "training",
        "units",
        "",
    },
    "progress": {"notebook", "privacy"},
    "threads": set(),
    "computed": set(),
    "checkpoint": {"computed", "privacy", "storage"},
    "ranks": {"computed", "methods", "privacy"},
    "rank_rows": {"computed", "privacy", "rows", "sources"},
    "resume": {
        "checkpoint",
        "computed",
        "methods",
        "networks",
        "posteriors",
        "privacy",
        "progress",
        "rank_rows",
        "ranks",
        "rows",
        "shard_files",
    },
    "shard_files": {"networks", "privacy"},
    "fit_arguments": {"methods", "priors", "privacy"},
    "captured": {"contributions", "messages", "methods", "networks", "privacy", "resume"},
    "open_training": {"contributions", "messages", "methods", "resume"},
    "training": {
        "captured",
        "fit_arguments",
        "progress",
        "threads",
        "open_training",
        "rank_rows",
        "ranks",
        "resume",
        "messages",
        "privacy",
        "contributions",
        "likelihoods",
        "mixtures",
        "networks",
        "priors",
        "posteriors",
        "methods",
        "rows",
        "units",
        "",
    },
    "silos": {
        "computed",
        "likelihoods",
        "messages",
        "methods",
        "networks",
        "posteriors",
        "priors",
        "privacy",
        "resume",
        "rows",
        "sources",
        "training",
        "",
    },
    "estimators": {
        "calibration",
        "checkpoint",
        "fit_arguments",
        "progress",
        "report",
        "messages",
        "privacy",
        "data",
        "evaluation",
        "likelihoods",
        "methods",
        "networks",
        "posteriors",
        "predictive",
        "priors",
        "storage",
        "training",
        "units",
        "",
    },
    "runs": {"privacy", "data", "estimators", "evaluation", "predictive", "report", "storage", ""},
    "cli": {
        "data",
        "estimators",
        "evaluation",
        "messages",
        "predictive",
        "privacy",
        "report",
        "reproduce",
        "runs",
        "storage",
        "",
        "__version__",
    },
    "reproduce": {
        "calibration",
        "privacy",
        "contributions",
        "data",
        "evaluation",
        "likelihoods",
        "methods",
        "mixtures",
        "networks",
        "posteriors",
        "predictive",
        "priors",
        "report",
        "training",
        "",
        "__version__",
    },
}


# Privacy arithmetic is done in `privacy/` and, for the papers' numbers, in `reproduce/`. What else
# names an accountant, or asks for an epsilon, and why that is no arithmetic:
ASKS = {
    ("__init__.py", "ACCOUNTANTS"): "a public name",
    ("cli/account.py", "ACCOUNTANTS"): "the table says which accountants are rigorous",
    ("report/comparison.py", "epsilon + or -"): "puts a sign before the text of an epsilon",
    ("cli/account.py", "epsilon()"): "asks a ledger what it has spent, to print it",
}


def run(code, *flags):
    return subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True
    )


def imports(path):
    """The modules of dpbnn that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dpbnn"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from [node.module, *(names if node.module == "dpbnn" else [])]
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("dpbnn"))


def room(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def violations(name, files):
    return [
        (str(path.name), module)
        for path in files
        for module in imports(path)
        if room(module) not in {name, *BELOW[name]}
    ]


@pytest.mark.parametrize("name", list(BELOW))
def test_imports_point_one_way(name):
    folder = SOURCE / name
    files = sorted(folder.glob("**/*.py")) if folder.is_dir() else [SOURCE / f"{name}.py"]
    assert files
    assert violations(name, files) == []


def test_no_file_is_long():
    long = {
        p.name: n for p in SOURCE.glob("**/*.py") if (n := len(p.read_text().splitlines())) > 450
    }
    assert not long


def switches(files):
    """Ways to change what a gate does from far away: context variables, thread-local switches."""
    return [
        (path.name, node.id if isinstance(node, ast.Name) else node.attr)
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name | ast.Attribute)
        and (node.id if isinstance(node, ast.Name) else node.attr) in ("ContextVar", "contextvars")
    ]


def test_privacy_has_no_context_variable(tmp_path):
    assert switches(SOURCE.glob("**/*.py")) == []
    wrong = tmp_path / "gate.py"
    wrong.write_text("import contextvars\nX = contextvars.ContextVar('x')\n")
    assert switches([wrong])


def test_nobody_needs_audits_or_the_papers():
    """But the command, and names that `dpbnn` looks up when they are asked for."""
    found = {
        (path.relative_to(SOURCE).as_posix(), module)
        for path in SOURCE.glob("**/*.py")
        for module in imports(path)
        if room(module) in ("audit", "reproduce")
        and path != SOURCE / "__init__.py"
        and path.relative_to(SOURCE).parts[0].removesuffix(".py") not in ("audit", "reproduce")
    }
    assert found == {("cli/program.py", "dpbnn.reproduce.command")}


def test_the_architecture_test_would_see_a_wrong_import(tmp_path):
    wrong = tmp_path / "gate.py"
    wrong.write_text("def f():\n    from dpbnn.contributions import dense\n")
    assert violations("privacy", [wrong])


def arithmetic(path):
    """What a file does with accountants, events and epsilons, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        name = getattr(node, "id", getattr(node, "attr", None))
        if isinstance(node, ast.ImportFrom | ast.Import):
            names = {alias.name for alias in node.names}
            if getattr(node, "module", "") == "dpbnn.privacy.accountants":
                yield from names
            elif {"accountants", "dpbnn.privacy.accountants"} & names:
                yield "accountants"
        elif name == "ACCOUNTANTS":
            yield name
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", None))
            owner = getattr(getattr(node.func, "value", None), "id", None)
            if called == "epsilon" or called == "Event" or owner == "Event":
                yield f"{called}()"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            for side in (node.left, node.right):
                if getattr(side, "id", getattr(side, "attr", None)) == "epsilon":
                    yield "epsilon + or -"


def test_privacy_arithmetic_is_done_in_one_room():
    found = {
        (path.relative_to(SOURCE).as_posix(), what)
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] not in ("privacy", "reproduce")
        for what in arithmetic(path)
    }
    assert found == set(ASKS)


@pytest.mark.parametrize(
    "code",
    [
        "from dpbnn.privacy.accountants import accountant",
        "from dpbnn.privacy import accountants",
        "import dpbnn.privacy.accountants",
        "dpbnn.ACCOUNTANTS['pld']",
        "by.epsilon(events, 1e-5)",
        "Event('full-batch', 1.0)",
        "dpbnn.Event('full-batch', 1.0)",
        "Event.from_dict(values)",
        "total = before.epsilon + after",
        "left = budget - epsilon",
    ],
)
def test_privacy_arithmetic_elsewhere_would_be_seen(code, tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(code)
    assert list(arithmetic(wrong))


def test_import_takes_no_time_and_needs_no_extra():
    """`import dpbnn` adds under 0.3 s to `import torch`; nothing heavy or optional comes along.

    CPU time, and the least of three, so that busy machines and uncompiled files do not matter.
    """
    code = (
        "import torch, time, sys; begin = time.process_time(); import dpbnn;"
        "print(time.process_time() - begin);"
        "loaded = {'dp_accounting', 'scipy', 'sklearn', 'matplotlib', 'opacus'} & set(sys.modules);"
        "assert not loaded, loaded"
    )
    assert min(float(run(code).stdout) for _ in range(3)) < 0.3


def test_the_core_works_without_any_extra_installed():
    """Extras are made unimportable; planning, a ledger and the command still work."""
    code = """
import sys
from importlib.machinery import PathFinder
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split('.')[0] in {'matplotlib', 'opacus', 'hypothesis', 'pytest', 'pandas',
                                  'netcal', 'mapie', 'pdoc', 'mypy', 'ruff'}:
            return None
        return super().find_spec(name, path, target)
sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
for extra in ('pandas', 'pytest'):
    try:
        __import__(extra)
    except ModuleNotFoundError:
        continue
    raise AssertionError(extra + ' can be imported')
import dpbnn
for name in dpbnn.__all__:
    getattr(dpbnn, name)
dpbnn.plan(noise_multiplier=1.0, delta=1e-5, n=100, batch_size=10, steps=10)
import tempfile
from dpbnn.cli import main
try:
    main(['demo', '--out', tempfile.mkdtemp() + '/demo'])
except SystemExit as stop:
    assert not stop.code
"""
    assert "Privacy plan" in run(code).stdout


def test_type_checkers_and_users_see_the_same_names():
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If))
    static = {alias.asname or alias.name for n in block.body for alias in n.names}
    assert static == {*dpbnn._MODULE_OF, *dpbnn._CALLABLE, *dpbnn._ROOMS}
    assert set(dir(dpbnn)) == {*static, "__version__"}


def test_contributions_is_a_function_and_a_package():
    import torch

    c = dpbnn.contributions(
        torch.nn.Linear(3, 2), "categorical", torch.randn(4, 3), torch.ones(4).long()
    )
    assert c.norms().shape == (4,)
    assert dpbnn.contributions.DenseContributions is dpbnn.DenseContributions


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dpbnn.nothing


def test_docstring_examples_hold():
    import doctest

    from dpbnn.privacy import langevin, plan

    for module in (plan, langevin):
        result = doctest.testmod(module)
        assert result.attempted
        assert not result.failed


def test_every_test_that_the_pitfalls_page_names_exists():
    root = Path(__file__).parent
    page = (root.parent / "docs" / "pitfalls.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert len(rows) >= 24
    code = "\n".join(path.read_text() for path in root.rglob("test_*.py"))
    for row in rows:
        for name in row.split("|")[4].replace("`", "").split(","):
            name = name.strip()
            assert f"def {name}(" in code or f"class {name}" in code or (list(root.rglob(name))), (
                name
            )
