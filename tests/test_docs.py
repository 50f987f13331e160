"""The pages: links, anchors and names in them exist, and their scripts run. The site, as `make docs` builds it."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections import Counter
from functools import cache, reduce
from html import unescape
from pathlib import Path

import passes
import shardtrace  # isort: split  before passes, as users do
import shardtrace.testing
from passes.pipeline import AFTER_LOWERING, BEFORE_AUTODIFF

import pytest
from ranks import on_ranks, run_script

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES += [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "notebooks").glob("*.py"))]
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"[\w./-]+\.(?:py|md|ipynb)|(?:passes|shardtrace|tests|examples|docs|notebooks)/[\w/-]*")
NAME = re.compile(r"(?:passes|shardtrace|thunder|torch)(?:\.\w+)+")
PLACEHOLDERS = ("model.py", "script.py", "train.py", "test_my_pass.py")  # files that a user has


# ---- the pages ----


def markdown(page):
    """The text of a page; of a notebook's source that of its Markdown cells."""
    if page.suffix == ".md":
        return page.read_text()
    cells = re.split(r"^# %%", page.read_text(), flags=re.MULTILINE)
    texts = [cell.partition("\n")[2] for cell in cells if cell.startswith(" [markdown]")]
    return re.sub(r"^# ?", "", "\n".join(texts), flags=re.MULTILINE)


@cache
def files():
    """The paths of the repository, folders included, relative to its root."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    found = [Path(line) for line in listed if (ROOT / line).exists()]
    return {str(path) for file in found for path in (file, *file.parents)}


def anchors(text):
    """The anchors that GitHub gives to the headings of a page."""
    counts, found = Counter(), set()
    for heading in re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(f"{name}-{counts[name]}" if counts[name] else name)
        counts[name] += 1
    return found


def broken_links(text, folder):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", text)):
        if re.match(r"\w+:", target):
            continue  # another site
        path, _, anchor = target.partition("#")
        there = (folder / path).resolve()
        if path and (not there.is_relative_to(ROOT) or str(there.relative_to(ROOT)) not in files()):
            yield f"{target}: no such file"
        elif anchor and anchor not in anchors(markdown(there) if path else text):
            yield f"{target}: no such heading"


def wrong_names(text):
    """Paths and dotted names in backticks, and paths in commands, that do not exist."""
    spans = re.findall(r"`([^`\n]+)`", FENCED.sub("", text))
    commands = [block[0] for block in FENCED.finditer(text) if block[0].startswith("```console")]
    words = [word for span in spans for word in span.split()]
    words += [word for command in commands for word in command.split() if "/" in word]
    for word in words:
        if PATH.fullmatch(word):
            if not exists(word.removesuffix("/")):
                yield f"{word}: no such file"
        elif (name := NAME.match(word)) and not is_name(name[0]):
            yield f"{name[0]}: no such name"


def exists(path):
    """A path from the root or from examples/, the bare name of any file, or a placeholder."""
    name = Path(path).name
    return bool({path, f"examples/{path}"} & files()) or name in PLACEHOLDERS or (path == name and name in names())


@cache
def names():
    return {Path(path).name for path in files()}


def is_name(dotted):
    package, *rest = dotted.split(".")
    try:
        reduce(attribute, rest, importlib.import_module(package))
    except (AttributeError, ImportError):
        return False
    return True


def attribute(owner, name):
    if inspect.ismodule(owner) and not hasattr(owner, name):
        return importlib.import_module(f"{owner.__name__}.{name}")
    return getattr(owner, name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_names_exist(page):
    text = markdown(page)
    assert [*broken_links(text, page.parent), *wrong_names(text)] == []


def test_wrong_links_and_names_are_found():
    links = (
        "# One\n\n[a](design.md) [b](#one) [c](#two) [d](gone.md) [e](design.md#gone) [f](https://example.org/gone)\n"
    )
    wrong = ["#two: no such heading", "gone.md: no such file", "design.md#gone: no such heading"]
    assert list(broken_links(links, ROOT / "docs")) == wrong
    text = "`passes/gone.py` `gone.py` `passes/gone/` `passes/schedule.py` `passes.schedule` `shardtrace.fsdp(model)`\n"
    text += "`passes.gone.x()`\n\n```console\npython examples/gone.py examples/gpt2/train.py\n```\n"
    wrong = ["passes/gone.py: no such file", "gone.py: no such file", "passes/gone/: no such file"]
    assert list(wrong_names(text)) == [*wrong, "passes.gone.x: no such name", "examples/gone.py: no such file"]


# ---- scripts and messages in the pages ----

GUIDE = sorted((ROOT / "docs/guide").glob("*.md"))
SCRIPT = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
README_NEEDS = """
import os, torch
from types import SimpleNamespace as config
GPT = lambda _: torch.nn.Bilinear(4, 4, 1)
batches = [torch.ones(2, 1, 4)]
torch.manual_seed(0)
"""


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


@pytest.mark.parametrize("page", [ROOT / "README.md", *GUIDE], ids=lambda page: page.stem)
def test_first_script_runs(page, tmp_path):
    """The first block of Python in a page is a script for torchrun. It runs on two ranks, in an empty folder."""
    script = SCRIPT.search(page.read_text())[1]
    if page.stem == "README":
        script = README_NEEDS + script
    for package, extra in {"transformers": "hf", "accelerate": "examples"}.items():
        if package in script:
            pytest.importorskip(package, reason=f"pip install 'shardtrace[{extra}]'")
    file = tmp_path / "script.py"
    file.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{script}")
    printed = run_script(file, [], 2)
    assert printed or "print" not in script


# The other samples of the pages that a new user reads first, by a word of each; and what a script has around them.
NET = """
import shardtrace, thunder, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from shardtrace import CommPolicy

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x, y=None):
        return self.layer(x) if y is None else F.mse_loss(self.layer(x), y)

    encode = forward

torch.manual_seed(0)
model = Net()
x = torch.randn(2, 64)
batches = loader = 4 * [(x, x)]
"""
SHARDED = NET + "shardtrace.fsdp(model)\noptimizer = torch.optim.AdamW(model.parameters())\n"
SAMPLES = {
    "start": {
        "mp_policy": NET,
        "nullcontext": SHARDED,
        "penalty": SHARDED + "criterion, y = nn.MSELoss(), x",
        "labels": SHARDED
        + """
labels, forward = torch.tensor([[1, -100 + dist.get_rank()]]), model
model = lambda input_ids, labels: type("Output", (), {"loss": forward(input_ids, input_ids)})""",
        "join": SHARDED,
    },
    "from-ddp": {"shardtrace.parallel": NET},
    "frameworks": {
        "register_forward_method": NET,
        "thunder.jit(step)": NET + "import passes\nteacher = Net()\nmy_pass = lambda trace: trace",
        '"torchcompile"]': SHARDED,
        "histogram": NET + "model = nn.Linear(4, 4)",
    },
    "communication": {"lm_head": NET},
}


def sample(page, word):
    """The shortest block of Python of a page that has this word."""
    blocks = SCRIPT.findall((ROOT / f"docs/guide/{page}.md").read_text())[1:]
    return min((block for block in blocks if word in block), key=len)


@pytest.mark.parametrize(("page", "word"), [(page, word) for page, words in SAMPLES.items() for word in words])
@on_ranks(2)
def test_other_samples_run(page, word):
    exec(compile(f"{SAMPLES[page][word]}\n{sample(page, word)}", f"{page}.py", "exec"), {"__name__": "page"})


def test_samples_are_whole():
    """Those that do not run have "..." for what a script has there, or start ranks of their own."""
    for page in SAMPLES:
        run = [sample(page, word) for word in SAMPLES[page]]
        others = [b for b in SCRIPT.findall((ROOT / f"docs/guide/{page}.md").read_text())[1:] if b not in run]
        assert all("..." in block or "fabric.launch" in block for block in others), others


OF_TORCH = (
    "got mixed torch.Tensor and DTensor", "does not have a sharding strategy registered",
    "Cannot flatten unevenly sharded tensor",
)  # fmt: skip


def test_quoted_messages_are_raised():
    """Each message of the tables in troubleshooting is in the sources, or torch's; "..." stands for anything."""
    page = (ROOT / "docs/guide/troubleshooting.md").read_text()
    tables = page.partition("## From the message")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in tables.splitlines() if line.startswith("|")]
    quoted = [part.strip() for row in rows for span in re.findall(r"`([^`]+)`", row) for part in span.split("...")]
    texts = "\n".join(strings(file) for room in ("shardtrace", "passes") for file in (ROOT / room).rglob("*.py"))
    assert len(quoted) > 30
    assert [part for part in quoted if part not in texts and part not in OF_TORCH] == []


def strings(file):
    """The strings of a file, one a line. The values in f-strings are left out."""
    found = [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.ClassDef)
    ]
    return "\n".join(text(node) for node in found)


def text(node):
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
    return node.name if isinstance(node, ast.ClassDef) else str(node.value)


# ---- the site ----

MODULES = {"shardtrace": shardtrace, "passes": passes, "testing": shardtrace.testing}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site. A broken link or anchor, a page outside the navigation, or an unreadable docstring fails."""
    pytest.importorskip("mkdocstrings", reason="pip install 'shardtrace[docs]'")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", ROOT / "docs/site/mkdocs.yml"]
    done = subprocess.run([*build, "--site-dir", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("page", MODULES)
def test_every_public_name_is_in_it(site, page):
    module, html = MODULES[page], (site / f"api/{page}.html").read_text()
    shown = words(unescape(re.sub(r"<[^>]*>", " ", html)))
    for name in module.__all__:
        assert f'id="{module.__name__}.{name}"' in html, name
        if docstring := inspect.getdoc(getattr(module, name)) if callable(getattr(module, name)) else None:
            first = re.split(r"\n\n|(?<=\.)\s", docstring)[0]
            assert words(first) in shown, f"{name}: {first}"
        else:
            assert not callable(getattr(module, name)), f"{module.__name__}.{name} has no docstring"


def words(text):
    """The letters and digits of a text, because roles, quotes and line ends are rendered differently."""
    return "".join(re.findall(r"\w+", re.sub(r":\w+:`", " ", text)))


def test_docstrings_are_rendered(site):
    html = (site / "api/shardtrace.html").read_text()
    assert 'href="#shardtrace.no_sync"' in html  # a role has become a link
    assert "sharding_strategy" in (site / "search/search_index.json").read_text()
    assert not re.search(r":(func|class|mod|data):", html)


def test_links_out_of_the_docs(site):
    """The README is the first page, and links to files that are not in the site have become text."""
    html = (site / "index.html").read_text()
    assert 'href="guide/start.html"' in html
    assert "fsdp_by_hand.ipynb" not in html


# Statements that change something of torch, Thunder, Python or the process.
CHANGE = re.compile(
    r"mock\.patch|\bsetattr\(torch|sys\.modules\[\S+ =|sys\.excepthook =|atexit\.register|sys\.set\w+\(|mallopt\(|"
    r"set_default_dtype\(|addFilter\(|register_(?:optimizer_|module_|general_jit_|plugin|state_dict_|load_state)\w*\(|"
    r"register_prehook\(|\.__class__ = |executors_list = |_constraints = |autocast_stack = |random\.setstate\(|"
    r"\b(?:BaseRecipe|ThunderModule|FSDPParamGroup|GradScaler|clip_grad|torchs_state_dict|wrapper|transform|cls)\.\w+ = "
)


def changes():
    """The module, and the function or class, of each such statement in both packages."""
    for file in sorted(file for package in ("passes", "shardtrace") for file in (ROOT / package).rglob("*.py")):
        module, text = ".".join(file.relative_to(ROOT).with_suffix("").parts), file.read_text()
        lines = text.splitlines()
        for node in ast.parse(text).body:
            if CHANGE.search("\n".join(lines[node.lineno - 1 : node.end_lineno])):
                yield module, getattr(node, "name", "")


def test_each_change_is_on_the_page_of_changes():
    page = (ROOT / "docs" / "changes.md").read_text()
    found = list(changes())
    assert {("passes.compat.versions", "install"), ("shardtrace.ranks.failure", "tell_others_of_failure")} <= {*found}
    assert [where for where in found if f"`{where[0]}`" not in page and f"`{'.'.join(where)}`" not in page] == []


def test_the_table_of_passes_is_the_pipeline():
    page = (ROOT / "docs" / "design.md").read_text()
    rows = re.findall(r"^\| `?([\w ]+)`? \| [\w, ]+ \| (.+?) \| (yes)? +\|$", page, re.MULTILINE)
    entries = [*BEFORE_AUTODIFF, *AFTER_LOWERING]
    assert rows == [(e.name, e.does.replace("``", "`"), "" if e.needed else "yes") for e in entries]
