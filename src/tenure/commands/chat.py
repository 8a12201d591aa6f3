"""``tenure chat``: talk to a model in one session of fixed size."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tenure.commands.explain import spans_table
from tenure.commands.options import MemoryOptions, ModelOptions, SamplingFlags, load_engine
from tenure.commands.places import check_save
from tenure.commands.view import say
from tenure.errors import PlanError, TenureError
from tenure.plan import Plan
from tenure.timing import now

if TYPE_CHECKING:
    from pathlib import Path

    from tenure.config import SessionConfig
    from tenure.engine import Engine
    from tenure.sampling import SamplingOptions
    from tenure.session import Session

HELP = """\
/stats           what the cache holds
/explain [SPAN]  where a span is and why; all spans without an id
/plan            the plan's steps
/plan STEP       the next message belongs to this step
/save PLACE      save the session: a file, or tier:NAME
/reset           start again, with the same system message and plan
/help            this list
/quit            leave; so does the end of input
Ctrl-C stops an answer, the session goes on."""


def run(
    model: ModelOptions,
    memory: MemoryOptions,
    sampling: SamplingFlags,
    *,
    system: str | None,
    plan: Path | None,
    load: str | None = None,
    save: str | None = None,
) -> None:
    """Read messages until the end of input; see ``tenure chat --help``."""
    config = memory.session_config()
    options = sampling.options()
    steps = _read_plan(plan)
    check_save(save)
    engine = load_engine(model, memory.config)
    check_save(save, engine)
    chat = Chat(engine, config, options, steps, system)
    if load is not None:
        chat.load(load)
    chat.loop()
    if save is not None:
        chat.session.save(save)


def _read_plan(path: Path | None) -> Plan:
    if path is None:
        return Plan()
    try:
        return Plan.from_json(path.read_bytes())
    except OSError as error:
        raise PlanError(
            f"cannot be read: {error.strerror}", option=str(path), way_out="Give a JSON file"
        ) from error


@dataclass
class Chat:
    """The conversation and its commands.

    Args:
        engine: the model.
        config: of the session.
        options: of the answers.
        plan: as it is at the start of a session.
        system: system message, or None.
    """

    engine: Engine
    config: SessionConfig
    options: SamplingOptions
    plan: Plan
    system: str | None

    def __post_init__(self) -> None:
        self.out = Console(highlight=False)
        self.step: str | None = None
        self.session = self._start()

    def loop(self) -> None:
        """Until ``/quit`` or the end of input."""
        with suppress(ImportError):
            import readline  # noqa: F401  # line editing and history for input()
        budget = "no budget" if self.config.budget is None else f"budget {self.config.budget:,}"
        title = f"{self.engine.name}, {self.config.policy}, {budget}. /help lists the commands."
        self.out.print(Text(title, style="dim"))
        while (line := self._ask()) is not None:
            try:
                if not line.strip():
                    continue
                if line.startswith("/"):
                    if self._command(*line.split(maxsplit=1)):
                        return
                else:
                    self._answer(line)
            except TenureError as error:  # a message or a command is at fault, never the session
                self.out.print(Text(f"error: {error}", style="red"))

    def load(self, place: str) -> None:
        """Go on with a saved session, with the options that it was saved with."""
        self.session = self.engine.restore(place)
        self.config, self.plan = self.session.config, self.session.plan.copy()

    def _ask(self) -> str | None:
        try:
            return self.out.input("[bold]> [/]") if sys.stdin.isatty() else input()
        except EOFError:
            if sys.stdin.isatty():
                self.out.print()
            return None
        except UnicodeDecodeError as error:
            self.out.print(f"error: the input is not UTF-8: {error.reason}", style="red", markup=False)
            return ""
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            self.out.print("\n[dim]/quit leaves[/]")
            return ""

    def _answer(self, text: str) -> None:
        message = {"role": "user", "content": text, **({"step": self.step} if self.step else {})}
        # Some templates refuse a system message that stands alone, so it comes with the first question.
        first = self.system is not None and not len(self.session) and not self.session.memory.waiting
        self.session.queue(
            [{"role": "system", "content": self.system}, message] if first else message, reply=True
        )
        self.step = None
        device, turn = self.engine.layout.device, None
        started = now(device)
        try:
            self.engine.drain([self.session])
            read = now(device)
            turn = self.session.start_turn(self.options)
            for piece in turn:
                say(piece)
        except KeyboardInterrupt:
            if turn is not None:
                turn.close()
            self.out.print("\n[dim]stopped; the session has what you see[/]")
            return
        rate = len(turn.ids) / max(1e-9, now(device) - read)
        note = ", cut at --max-tokens" if turn.reason == "length" else ""
        self.out.print(
            f"\n[dim]{read - started:,.1f} s to read, {len(turn.ids)} tokens at {rate:,.1f}/s{note}[/]"
        )

    def _start(self) -> Session:
        return self.engine.session(self.config, plan=self.plan.copy())

    def _command(self, name: str, rest: str = "") -> bool:
        """Carry out a command; True ends the chat."""
        if name == "/quit":
            return True
        if name == "/help":
            self.out.print(HELP, markup=False)
        elif name == "/stats":
            self._stats()
        elif name == "/plan":
            self._plan(rest.strip())
        elif name == "/explain":
            spans = [rest.strip()] if rest.strip() else [span.id for span in self.session.memory.ledger.spans]
            self.out.print(spans_table([self.session.explain(span) for span in spans]))
        elif name == "/save" and rest.strip():
            size = self.session.save(rest.strip())
            self.out.print(f"[dim]{size / 1e6:,.1f} MB saved[/]")
        elif name == "/reset":
            self.session = self._start()
            self.out.print("[dim]a new session[/]")
        else:
            self.out.print(Text(f"no command {name}; /help lists them", style="red"))
        return False

    def _stats(self) -> None:
        table = Table(box=None, show_header=False)
        for name, value in asdict(self.session.stats()).items():
            shown = (
                f"{value:,.2f}"
                if isinstance(value, float)
                else f"{value:,}"
                if isinstance(value, int)
                else "-"
            )
            table.add_row(name.replace("_", " "), shown)
        self.out.print(table)

    def _plan(self, step: str) -> None:
        plan = self.session.plan
        if step:
            self.step = plan[step].id
            self.out.print(Text.assemble(("the next message belongs to step ", "dim"), step))
            return
        if not len(plan):
            self.out.print("[dim]no plan; give one with --plan FILE[/]")
        for one in plan.steps:
            mark = "done" if one.id in plan.finished else "now" if plan.current is one else ""
            reads = ", ".join(map(str, one.reads)) or "nothing"
            self.out.print(Text(f"{mark:>4}  {one.id}  reads {reads}"))
