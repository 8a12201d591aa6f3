"""What the documents say of options, names and files is what the code has, and the other way round."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest
import typer

import tenure.compress
from tenure import Engine, SessionConfig
from tenure.cli import app
from tenure.commands.chat import HELP
from tenure.commands.play import Player
from tenure.models.adapter import STOCK_FAMILIES
from tenure.models.fused import FUSED_FAMILIES
from tenure.models.load import load_tokenizer
from tenure.models.sources import resolve
from tenure.planners import PLANNERS
from tenure.policies import POLICIES
from tenure.regions import Region
from tenure.report import REASONS, SessionStats, SpanReport
from tenure.sessionfile import _MESSAGE, _PROBE, _SESSION, load
from tenure.tiers.spec import CODECS
from tests.chats import chat_engine, tool, user
from tests.conftest import tiny_model

ROOT = Path(__file__).parent.parent
MADE = ("LOG.md", "results.md")
"""A log and a page of results: what they say was so then."""
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in MADE),
]
IDS = [page.stem for page in PAGES]


@cache
def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def doc(name: str) -> str:
    return text(ROOT / "docs" / f"{name}.md")


def commands(command, path=("tenure",)):
    """Every command with its words, groups too."""
    yield " ".join(path), command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


CALL = re.compile(r"(?:^|\s|/)(tenure (?:--|" + "|".join(typer.main.get_command(app).commands) + r").*)$")


def options(command):
    return {one for param in command.params for one in param.opts if one.startswith("-")} | {"--help"}


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


# -- links, commands, options ------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", text(page)):
        if target.startswith("http"):
            continue
        file, _, place = target.partition("#")
        found = page if not file else page.parent / file
        assert found.exists(), target
        if place:
            assert place in map(anchor, re.findall(r"^#+ (.*)$", text(found), re.MULTILINE)), target


def test_every_page_can_be_reached_from_the_readme():
    seen, coming = set(), [ROOT / "README.md"]
    while coming:
        page = coming.pop()
        if page not in seen:
            seen.add(page)
            links = re.findall(r"\]\(([^)#\s]+\.md)", text(page))
            coming += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert {page for page in PAGES if page.parent.name != "adr"} <= seen


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_in_the_docs(name):
    whole = "\n".join(map(text, PAGES))
    wanted = {one for one in options(COMMANDS[name]) if one.startswith("--")} - {"--help"}
    assert [one for one in sorted(wanted) if not re.search(rf"{re.escape(one)}(?![\w-])", whole)] == []


def lines_of_commands():
    """Every call of a command in code blocks and in inline code."""
    lines = []
    for page in PAGES:
        code = re.findall(r"^```\w*\n(.*?)^```", text(page), re.DOTALL | re.MULTILINE)
        code += re.findall(r"^ {4}tenure .*$", text(page), re.MULTILINE)
        code += re.findall(r"`(tenure [^`\n]+)`", text(page))
        for line in "\n".join(code).replace("\\\n", " ").splitlines():
            found = CALL.search(line)
            if found:
                lines.append(pytest.param(found[1], id=f"{page.stem}: {found[1][:60]}"))
    return lines


@pytest.mark.parametrize("line", lines_of_commands())
def test_command_lines_use_what_there_is(line):
    words = shlex.split(line.replace("...", ""), comments=True)
    name = words.pop(0)
    while words and f"{name} {words[0]}" in COMMANDS:
        name += f" {words.pop(0)}"
    command = COMMANDS[name]
    if getattr(command, "commands", None) and words and not words[0].startswith("-"):
        assert words[0].isupper(), f"{name} has no command {words[0]}"
    used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert used <= options(command)


def test_command_lines_are_found():
    assert len(list(lines_of_commands())) > 40


# -- names ------------------------------------------------------------------------------------------


def rows(page: str, heading: str) -> set[str]:
    """Names in the first column of the tables below a heading."""
    part = page.split(f"\n{heading}\n", 1)[1]
    part = part.split("\n## ", 1)[0]
    first = re.findall(r"^\| ([^|]+) \|", part, re.MULTILINE)
    return {name for cell in first for name in re.findall(r"`([^`]+)`", cell)}


def test_policies_planners_methods_and_tiers():
    table = re.findall(r"^\| `(\w+)` \|", doc("policies").split("## Foresight")[0], re.MULTILINE)
    assert set(table) == set(POLICIES)
    assert set(POLICIES) <= set(re.findall(r"\w+", text(ROOT / "README.md")))
    table = re.findall(r"^\| `(\w+)` \|", doc("planners").split("## explicit")[0], re.MULTILINE)
    assert set(table) == set(PLANNERS)
    methods = rows(doc("compression"), "## Other methods on the same store")
    assert methods == set(tenure.compress.METHODS) - {"gracekv"}
    assert len(methods - {"streaming", "random"}) == 10
    assert "GraceKV and ten other methods" in text(ROOT / "README.md")
    assert rows(doc("tiers"), "## Codecs") == set(CODECS)


def test_families():
    row = {line.split("`")[1]: line for line in doc("models").splitlines() if line.startswith("| `")}
    for executor, families in (("fused", FUSED_FAMILIES), ("transformers", STOCK_FAMILIES)):
        assert re.findall(r"`(\w+)`", row[executor])[1:] == sorted(families)
        assert list(families) == sorted(families)


def test_regions_reasons_and_chat():
    for page in ("memdecay", "server", "session-files"):
        assert all(f"`{region}`" in doc(page) for region in Region), page
    assert rows(doc("cli"), "## tenure explain") == set(REASONS)
    assert all(f"| `{reason}` | {meaning}" in doc("cli") for reason, meaning in REASONS.items())
    assert all(f"`{reason}`" in doc("memdecay") for reason in REASONS)
    assert set(REASONS) <= rows(doc("forgotten"), "## It was evicted")
    told = {word for row in rows(doc("cli"), "## tenure chat") for word in row.split()[:1]}
    assert told == set(re.findall(r"^/\w+", HELP, re.MULTILINE))


def test_fields_of_files_and_plans():
    told = set(re.findall(r"^\| `([\w.]+)` \|", doc("session-files"), re.MULTILINE))
    assert told == {"session", *(f"session.{name}" for name in _SESSION), *_MESSAGE, *_PROBE}
    schema = json.loads((ROOT / "src/tenure/data/plan.schema.json").read_text(encoding="utf-8"))
    assert rows(doc("plans"), "## JSON") == set(schema["properties"])


def test_fields_that_reports_have():
    used = re.findall(r"report\.(\w+)", doc("forgotten"))
    assert set(used) <= set(SpanReport.__dataclass_fields__)
    used = [*re.findall(r"stats\(\)\.(\w+)", "\n".join(map(text, PAGES)))]
    assert set(used) <= set(SessionStats.__dataclass_fields__)


def test_variables():
    sources = "\n".join(
        file.read_text(encoding="utf-8") for file in sorted((ROOT / "src/tenure").rglob("*.py"))
    )
    page = doc("configuration")
    quoted = set(re.findall(r'"(TENURE_[A-Z]+)"', sources))
    assert len(quoted) >= 7
    assert {one for one in quoted if f"`{one}`" not in page} == set()
    named = set(re.findall(r"TENURE_[A-Z_]+", "\n".join(map(text, PAGES))))
    assert {one for one in named if f"`{one}`" not in page} == set()


def test_extras():
    known = tomllib.loads(text(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
    for page in PAGES:
        for names in re.findall(r"(?:\.|/src|tenure)\[([\w,]+)\]'", text(page)):
            assert set(names.split(",")) <= set(known), page
    assert rows(doc("start"), "## Install") == set(known)


def test_what_is_not_published_is_not_installed_by_name():
    for page in PAGES:
        assert not re.search(r"^(RUN )?pip install.*'tenure", text(page), re.MULTILINE), page


# -- code -------------------------------------------------------------------------------------------


def python(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", doc(name), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_is_python(page):
    for code in re.findall(r"```python\n(.*?)```", text(page), re.DOTALL):
        compile(code, str(page), "exec")
    for code in re.findall(r"```toml\n(.*?)```", text(page), re.DOTALL):
        tomllib.loads(code)
    for code in re.findall(r"```json\n(.*?)```", text(page), re.DOTALL):
        for line in code.strip().splitlines():
            json.loads(line)


def run(code: str, engines):
    names = {"engine": chat_engine(engines), "__name__": "__main__"}
    exec(compile(code, "docs", "exec"), names)
    return names["session"]


def test_a_policy_of_ones_own(engines, monkeypatch):
    monkeypatch.setattr("tenure.policies.POLICIES", dict(POLICIES))
    session = run(python("policies")[0], engines)
    for number in range(12):
        session.append(user(f"{number} " * 30, span=f"n{number}"))
    assert session.explain("n0").resident == 1.0
    assert session.explain("n11").resident > 0
    assert session.explain("n6").resident == 0
    session.check_integrity()


def test_a_planner_of_ones_own(engines, monkeypatch):
    monkeypatch.setattr("tenure.planners.PLANNERS", dict(PLANNERS))
    session = run(python("planners")[1], engines)
    session.append(user("the limit is 48", span="limits", region="scratchpad"))
    for number in range(30):
        session.append(user(f"{number} " * 30))
    assert session.explain("limits").resident < 1
    session.queue(user("what do limits say?"), reply=True)
    assert session.explain("limits").edges[0].planner == "mentioned"
    assert session.explain("limits").resident == 1, "it was fetched"
    session.fork().ask(user("and limits again?"), max_tokens=3)
    session.check_integrity()


def test_what_tells_why_something_was_forgotten(engines, capsys):
    session = chat_engine(engines).session(budget=256, chunk=64)
    session.append([user("the limit is 48", span="limits"), *(tool(f"{n} " * 30) for n in range(30))])
    exec(compile(python("forgotten")[0], "docs", "exec"), {"session": session})
    assert len(capsys.readouterr().out.splitlines()) == 2 + 5 + 1


def test_tools_and_json_without_a_server(engines, capsys):
    names = {"engine": chat_engine(engines, "tools")}
    for code in python("sessions")[1:]:
        exec(compile(code, "docs", "exec"), names)
    assert 0 <= json.loads(capsys.readouterr().out)["shards"] <= 99
    assert len(names["turn"].ids) > 0


@pytest.mark.model
def test_ten_minutes(capsys):
    exec(compile(python("start")[0], "docs", "exec"), {})
    assert re.search(r"\d+ of \d{3,} tokens; 1\.0 of the note", capsys.readouterr().out)


def played():
    """File, model and budget of each session that the pages play."""
    for line in lines_of_commands():
        words = shlex.split(line.values[0], comments=True)
        if words[1] in ("run", "explain") and words[2:] and words[2].startswith("examples/"):
            yield words[2], *(words[words.index(name) + 1] for name in ("--model", "--budget"))


@cache
def engine_with_tokenizer_of(model: str) -> Engine:
    tokens = load_tokenizer(resolve(model).path)
    return Engine(tiny_model("qwen2", layers=1, vocab_size=len(tokens) + 1000), tokens)


@pytest.mark.model
@pytest.mark.parametrize(("file", "model", "budget"), sorted(set(played())))
def test_what_the_examples_read_fits_the_budgets_of_the_docs(file, model, budget):
    player = Player(engine_with_tokenizer_of(model), load(ROOT / file), SessionConfig(budget=int(budget)))
    assert list(player.play(ask=False)) == []
