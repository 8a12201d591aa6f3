"""``tenure bench regions``: which regions of an agent's session still answer after compression.

A transcript with 24 planted facts is read into a session under each arm's policy and budget; then every fact is asked
for in a fork of the same compressed session, so that no answer helps another. All arms of a seed see the same
transcript, so that their scores are paired.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tenure.bench import record
from tenure.bench.regions_transcript import REGIONS, VERSION, AgentTranscript, Fact, transcript
from tenure.engine import Engine
from tenure.errors import ConfigError
from tenure.messages import Message
from tenure.policies.normalise import NORMALISATIONS
from tenure.regions import Region
from tenure.session import Session

Note = Callable[[str], None]

_LATE = {"compress": "gracekv", "compress_ratio": 8.0}
_PIN = {"regions": {"system": {"pin": "hard"}}}
_FORK_BYTES = 1 << 30
"""Memory that the slabs of the forks of one batch may take."""


def _memdecay(**options: Any) -> dict[str, Any]:
    return {"policy": "memdecay", "policy_options": options}


ARMS: dict[str, dict[str, Any]] = {
    "none": {"policy": "full"},
    "truncated": {"policy": "full"},
    "random": {"policy": "random"},
    "recency": {"policy": "recency"},
    "h2o": {"policy": "h2o"},
    "snapkv": {"policy": "snapkv"},
    "tova": {"policy": "tova"},
    "memdecay": _memdecay(),
    "memdecay-pinned": _memdecay() | _PIN,
    "memdecay-bounded": _memdecay() | {"positions": "bounded"},
    "memdecay-decay-only": _memdecay(mix=1.0),
    "memdecay-heavy-only": _memdecay(mix=0.0),
    "memdecay-no-regions": _memdecay(regions=False),
    "memdecay-no-decay": _memdecay(decay=False),
    "memdecay-no-refresh": _memdecay(refresh="none"),
    "memdecay-no-pages": _memdecay(page=1),
    "auto": {"policy": "auto"},
    "auto-compressed": {"policy": "auto"} | _LATE,
    "h2o-compressed": {"policy": "h2o"} | _LATE,
    "memdecay-layers": _memdecay() | {"granularity": "layer"},
    **{f"memdecay-{name.replace('_', '-')}": _memdecay(normalise=name) for name in NORMALISATIONS},
    "h2o-pinned": {"policy": "h2o"} | _PIN,
    "h2o-shared": {"policy": "h2o", "granularity": "session"},
}
"""Session options by arm. ``truncated`` reads only the newest tokens of the text, as many as the budget holds. Arms that
compress read turn by turn, the others all at once."""


@dataclass(frozen=True, kw_only=True)
class RegionsConfig:
    """What is played.

    Args:
        models: by name.
        lengths: of the transcripts, in tokens.
        budgets: as shares of the transcript.
        seeds: of the transcripts.
        arms: which of :data:`ARMS`.
        chunk: tokens a forward; evictions happen between chunks.
        dtype: see :class:`~tenure.config.EngineConfig`.
        device: a torch device.
        regions: file of a calibration for the region table, or None.
    """

    models: tuple[str, ...] = ("qwen2.5-coder-0.5b",)
    lengths: tuple[int, ...] = (450, 1700)
    budgets: tuple[float, ...] = (0.125, 0.25, 0.5)
    seeds: tuple[int, ...] = tuple(range(10))
    arms: tuple[str, ...] = tuple(ARMS)
    chunk: int = 256
    dtype: str = "auto"
    device: str = "cpu"
    regions: str | None = None

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.arms) - set(ARMS)):
            raise ConfigError(
                f"{unknown[0]!r} is not known", option="arms", way_out=f"Known: {', '.join(ARMS)}"
            )
        for option in ("models", "lengths", "budgets", "seeds", "arms"):
            if not getattr(self, option):
                flag = "model" if option == "models" else option
                raise ConfigError("none is given", option=flag, way_out="Give one or more")
        if short := [number for number in (*self.lengths, self.chunk) if number < 1]:
            option = "chunk" if self.chunk < 1 else "lengths"
            raise ConfigError(f"{short[0]} is too small", option=option, way_out="Give at least 1")
        for share in self.budgets:
            if not 0 < share < 1:
                raise ConfigError(f"{share} is no share", option="budgets", way_out="Give 0.125, for example")


def cells(config: RegionsConfig) -> Iterator[tuple[str, int, float]]:
    """Model, length and budget of each summary."""
    for model in config.models:
        for length in config.lengths:
            for budget in config.budgets:
                yield model, length, budget


def run_file(folder: Path, model: str, length: int, budget: float, seed: int) -> Path:
    """Where one seed's numbers lie."""
    return folder / "runs" / f"{_stem(model, length, budget)}-{seed}.json"


def summary_file(folder: Path, model: str, length: int, budget: float) -> Path:
    """Where the summary of a model, length and budget lies."""
    return folder / f"{_stem(model, length, budget)}.json"


def _stem(model: str, length: int, budget: float) -> str:
    return f"{re.sub(r'[^A-Za-z0-9.]+', '-', model)}-{length}-{budget * 100:g}"


def run(
    config: RegionsConfig,
    folder: Path,
    note: Note,
    *,
    resume: bool = True,
    load: Callable[[str], Engine] | None = None,
) -> None:
    """Play whatever is missing and write one file for each model, length, budget and seed.

    Args:
        config: what is played.
        folder: of the results.
        note: told what is being played.
        resume: keep the arms that a file has already.
        load: gives the engine of a model; by default it is loaded by name.
    """
    load = load or (lambda model: Engine.load(model, dtype=config.dtype, device=config.device))
    engines: dict[str, Engine] = {}
    full: dict[tuple[str, int, int], Any] = {}  # the full cache knows no budget: one run serves them all
    for model, length, budget in cells(config):
        for seed in config.seeds:
            path = run_file(folder, model, length, budget, seed)
            old = _kept(path, config) if resume else {}
            same = (model, length, seed)
            if "none" in old:
                full[same] = old["none"]
            missing = [name for name in config.arms if name not in old]
            if not missing:
                continue
            if model not in engines:
                engines = {model: load(model)}
            known = {"none": full[same]} if "none" in missing and same in full else {}
            missing = [name for name in missing if name not in known]
            result = play_seed(engines[model], config, length, budget, seed, missing, note)
            origin = record.origin()
            for arm in result["arms"].values():
                arm["commit"] = origin["commit"]
            result["arms"] = old | known | result["arms"]
            if "none" in result["arms"]:
                full[same] = result["arms"]["none"]
            setting = asdict(config) | {
                "model": model,
                "length": length,
                "budget": budget,
                "seed": seed,
                "task_version": VERSION,
            }
            record.write(path, {"bench": "regions", **origin, "config": setting, **result})


def export(config: RegionsConfig, path: Path) -> int:
    """Write the transcripts of all lengths and seeds, a message list a line; returns how many.

    Lengths are counted by the tokenizer of the first model.
    """
    from transformers import AutoTokenizer

    from tenure.models.sources import resolve

    tokenizer = AutoTokenizer.from_pretrained(resolve(config.models[0]).path)
    lines = [
        json.dumps([_marked(message) for message in transcript(seed, length, _counter(tokenizer)).messages])
        for length in config.lengths
        for seed in config.seeds
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return len(lines)


def _marked(message: Message) -> dict[str, Any]:
    region = {} if message.region is None else {"region": str(message.region)}
    return message.as_chat() | region


def _counter(tokenizer: Any) -> Callable[[str], int]:
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def _kept(path: Path, config: RegionsConfig) -> dict[str, Any]:
    """Arms of a file that was made with the same options.

    Raises:
        ConfigError: it was made with others: arms that differ in them as well cannot be compared.
    """
    found = stored(path)
    if found is None:
        return {}
    mine = {key: getattr(config, key) for key in ("chunk", "dtype", "device", "regions")}
    record.check_same(path, found["config"], mine, "folder")
    for arm in found["arms"].values():
        arm.setdefault("commit", found.get("commit"))
    return dict(found["arms"])


def stored(path: Path) -> dict[str, Any] | None:
    """What a file of :func:`run_file` holds; None if there is none, or one of another version of the task.

    Raises:
        ConfigError: it is damaged.
    """
    if not path.exists():
        return None
    found = record.read(path, ("config", "arms"), "no played transcript")
    return found if found["config"].get("task_version") == VERSION else None


def play_seed(
    engine: Engine,
    config: RegionsConfig,
    length: int,
    budget: float,
    seed: int,
    arms: Sequence[str],
    note: Note,
) -> dict[str, Any]:
    """All arms on one transcript."""
    script = transcript(seed, length, _counter(engine.tokenizer))
    found: dict[str, Any] = {}
    tokens = _length(engine, script)
    slots = round(tokens * budget)
    for name in arms:
        note(f"{length} tokens, budget {budget:.1%}, seed {seed}: {name}")
        base: dict[str, Any] = {"chunk": min(config.chunk, length), "positions": "logical"}
        if config.regions:
            base["regions"] = config.regions
        answers, seconds = play_arm(engine, script, name, ARMS[name], slots, base)
        right = [
            first_number(answer) == fact.value for answer, fact in zip(answers, script.facts, strict=True)
        ]
        found[name] = {
            "facts": by_region(script.facts, right),
            "wall_s": round(seconds, 3),
            "answers": answers,
        }
    return {"tokens": tokens, "slots": slots, "arms": found}


def _length(engine: Engine, script: AgentTranscript) -> int:
    chat = engine.transcript()
    if chat is None:
        raise ConfigError("the model has no chat template", option="model")
    return sum(len(piece.ids) for piece in chat.open(script.messages))


def play_arm(
    engine: Engine,
    script: AgentTranscript,
    name: str,
    options: Mapping[str, Any],
    slots: int,
    base: Mapping[str, Any],
) -> tuple[list[str], float]:
    """Answers of one arm, and the seconds that reading and answering took."""
    settings = {**base, **options}
    if isinstance(base.get("regions"), str) and "regions" in options:
        from tenure.region_table import load_regions

        table = load_regions(base["regions"])
        changes = options["regions"]
        settings["regions"] = {key: table.get(key, {}) | changes.get(key, {}) for key in table | changes}
    if settings["policy"] != "full":
        settings["budget"] = slots
    start = time.perf_counter()
    with engine.session(**settings) as session:
        if name == "truncated":
            chat = engine.transcript()
            pieces = [] if chat is None else chat.open(script.messages)
            session.append_ids([token for piece in pieces for token in piece.ids][-slots:])
        elif session.memory.late is not None:
            for turn in turns(script.messages):
                session.append(turn)
            session.memory.late.begin(session)  # the question begins a turn, in each fork of its own
        else:
            session.append(script.messages)
        answers = ask(session, script.facts)
    return answers, time.perf_counter() - start


def turns(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Messages as an agent's session gets them: up to each answer, and the answer."""
    group: list[Message] = []
    for message in messages:
        if message.role == "assistant" and group:
            yield group
            group = []
        group.append(message)
        if message.role == "assistant":
            yield group
            group = []
    if group:
        yield group


def ask(session: Session, facts: Sequence[Fact]) -> list[str]:
    """Ask for every fact in a fork of its own, as many at once as memory is given for."""
    most = max(1, min(len(facts), _FORK_BYTES // max(1, session.memory.rows.nbytes)))
    answers: list[str] = []
    for at in range(0, len(facts), most):
        forks = [session.fork() for _ in facts[at : at + most]]
        for fork, fact in zip(forks, facts[at:], strict=False):
            question = {"role": "user", "content": fact.question}
            fork.queue(question, reply=True, beginning=fact.beginning)
        answers += session.engine.generate(forks, max_tokens=8, stop=("\n",))
        for fork in forks:
            fork.close()
    return answers


def first_number(answer: str) -> str | None:
    """The first number of an answer: what is compared with the fact's value."""
    match = re.search(r"\d+", re.sub(r"(?<=\d),(?=\d{3})", "", answer))
    return match[0] if match else None


def by_region(facts: Sequence[Fact], right: Sequence[bool]) -> dict[str, list[int]]:
    """``{REGION: [found, total]}``."""
    table: dict[str, list[int]] = {str(region): [0, 0] for region in REGIONS}
    for fact, one in zip(facts, right, strict=True):
        table[fact.region][0] += one
        table[fact.region][1] += 1
    return table


def unpinned(facts: Mapping[str, Sequence[int]]) -> int:
    """Facts found outside of the system region."""
    return sum(found for region, (found, _) in facts.items() if region != Region.SYSTEM)
