"""``Engine``: one model, many sessions, one forward for all of them.

A step packs what each session has waiting (a chunk of text here, one sampled token there) into a single row of
tokens. Linear layers see one matrix; attention looks at each session's own segments.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenure import sessionstore
from tenure.cache.attend import Forward, Watch, Work
from tenure.cache.rows import Layout
from tenure.config import EngineConfig, SessionConfig
from tenure.errors import ConfigError, ModelError
from tenure.fingerprint import Fingerprint, fingerprint, weights_digest
from tenure.heap import Heap
from tenure.interrupt import uninterrupted
from tenure.kernels import kernels_for
from tenure.kernels.build import capabilities
from tenure.kernels.threads import give_up_helpers
from tenure.memory import Device
from tenure.models.adapter import Adapter
from tenure.plan import Plan
from tenure.session import Session
from tenure.tiers.archive import SpanArchive
from tenure.tiers.stack import TierStack
from tenure.transcript import Transcript

if TYPE_CHECKING:
    from pathlib import Path

    from tenure.memory import Memory
    from tenure.tiers.record import Archive
    from tenure.turn import Turn

_log = logging.getLogger("tenure")

_SMALL_SLAB = 64 << 20
"""Slabs below this are not held against the free memory, which takes a while to find out."""

_TRANSCRIPTS = 64
"""Sets of tools whose empty transcripts are kept: making one takes a few milliseconds."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Engine:
    """A loaded model and the sessions that run on it.

    Use :meth:`load`, or give a transformers model and its tokenizer. The engine is for one thread at a time.

    Args:
        model: ``AutoModelForCausalLM``; it is hooked, and must not be used by others from then on.
        tokenizer: its tokenizer with a chat template, or None for raw ids only.
        config: options.
        name: shown in messages and results.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, *, config: EngineConfig | None = None, name: str = "model"
    ) -> None:
        self.config = config or EngineConfig()
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        self.name = name
        self.tokenizer = tokenizer
        self._transcripts: dict[str, Transcript] = {}
        self.heap = Heap()
        self._weights = weights_digest(model)  # of what was loaded: the adapter may give parts of it up
        self.adapter = Adapter.attach(model, executor=self.config.executor, weights=self.config.weights)
        self.tiers: TierStack | None = None
        """Where evicted spans live, for all sessions; None where none is configured."""
        if self.config.tiers:
            self.tiers = TierStack.of(self.config.tiers, self.fingerprint.digest)
            weakref.finalize(self, self.tiers.abandon)
        layout = self.adapter.layout
        self.kernels = kernels_for(layout.device)
        self.device = Device(
            layout=layout,
            cos_sin=lambda positions, largest, layer: self.adapter.ropes[layer].cos_sin(
                positions, largest=largest
            ),
            kernels=self.kernels,
            copy=self.config.rotate == "copy",
        )

    @classmethod
    def load(cls, model: str | Path, **options: Any) -> Engine:
        """Load a model by name.

        Args:
            model: a name of ``tenure models list``, a folder, a GGUF file or a hub id.
            options: fields of :class:`EngineConfig`.

        Raises:
            ModelError: it cannot be found, fetched, read or held in memory, or weights of it are missing.
            UnsupportedModelError: it cannot be run exactly.
        """
        from tenure.models.folder import check_memory
        from tenure.models.load import check_config, load_tokenizer, load_weights
        from tenure.models.sources import resolve

        config = EngineConfig(**options)
        device = compute_device(config.device)
        dtype = compute_dtype(config.dtype, device)
        found = resolve(str(model))
        check_config(found.path)
        check_memory(found.weight_bytes, dtype, parameters=found.parameters, device=str(device))
        tokenizer = load_tokenizer(found.path)
        loaded = load_weights(found.path, dtype)
        engine = cls(loaded.to(device), tokenizer, config=config, name=str(model))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # of the weights that were joined
        give_up_helpers()  # another thread may be the one that computes
        return engine

    @property
    def eos_ids(self) -> frozenset[int]:
        """End-of-text ids: the tokenizer's, and those of the model's generation config that it has as markers."""
        if self.tokenizer is None:
            return frozenset()
        named = getattr(getattr(self.adapter.model, "generation_config", None), "eos_token_id", None)
        markers = {place for place, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        found = markers.intersection(named if isinstance(named, list) else [named])
        return frozenset({*found, self.tokenizer.eos_token_id} - {None})

    @property
    def vocabulary(self) -> int:
        """Number of token ids the model knows."""
        return int(self.adapter.model.config.get_text_config().vocab_size)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What stored keys and values are bound to."""
        layout = self.layout
        return fingerprint(
            self._weights,
            self.tokenizer,
            self.adapter.ropes,
            windows=layout.windows,
            dtype=layout.dtype,
            shape=(layout.layers, layout.kv_heads, layout.head_dim),
            storage=self.config.weights,
        )

    @property
    def layout(self) -> Layout:
        """Shape of the model's keys and values."""
        return self.adapter.layout

    def transcript(
        self,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> Transcript | None:
        """An empty transcript of the model's template; None without a tokenizer. Safe to call on any thread.

        Args:
            tools: JSON schemas of the tools that the model may call, in OpenAI's form.
            template_options: further variables of the template, such as ``{"enable_thinking": False}``.
        """
        if self.tokenizer is None:
            return None
        key = json.dumps([list(tools or []), dict(template_options or {})], default=str)
        found = self._transcripts.get(key)
        if found is None:
            found = Transcript(
                self.tokenizer, tools=tools, template_options=template_options, eos_ids=self.eos_ids
            )
            while len(self._transcripts) >= _TRANSCRIPTS:
                self._transcripts.pop(next(iter(self._transcripts), ""), None)
            self._transcripts[key] = found
        return found.fork()

    def session(
        self,
        config: SessionConfig | None = None,
        *,
        plan: Plan | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        archive: Archive | None = None,
        **options: Any,
    ) -> Session:
        """Open a session.

        Args:
            config: options; the defaults if None.
            plan: steps of the agent's work and what they read; may also grow while the session runs.
            tools: see :meth:`transcript`.
            template_options: see :meth:`transcript`.
            archive: where evicted spans can be fetched from again; by default the engine's tiers.
            options: fields of :class:`SessionConfig` that replace those of ``config``.

        Raises:
            ConfigError: an option cannot work.
        """
        if options.get("policy") == "full":
            options.setdefault("budget", None)
        try:
            config = replace(config or SessionConfig(), **options)
        except TypeError as error:
            raise ConfigError(str(error), option="session") from error
        config = self._within_window(config)
        self._check_slab(config)
        if archive is None and self.tiers is not None and config.budget is not None:
            archive = SpanArchive(self.tiers)
        transcript = self.transcript(tools=tools, template_options=template_options)
        return Session(self, config, Plan() if plan is None else plan, transcript, archive)

    def restore(self, path: str | Path) -> Session:
        """A session as :meth:`Session.save` has written it; it goes on with the same ids as if it had never left.

        Args:
            path: of the file, or ``tier:NAME`` for the last of the engine's tiers that outlives it.

        Raises:
            SaveError: there is none, or its content is not what was saved.
            ConfigError: another model, tokenizer, dtype or format made it, or its slab does not fit the memory.
        """
        return sessionstore.load(self, path)

    def _within_window(self, config: SessionConfig) -> SessionConfig:
        """Bounded positions within those that the model was trained on, where the session chose no limit."""
        limit, window = config.position_limit, self.adapter.window
        if limit is None or config.limit is not None or window is None or limit <= window:
            return config
        capacity = config.capacity or 0
        if capacity <= window:
            return replace(config, limit=window)
        _log.warning(
            "positions will reach %d, %s was trained on %d: give a budget and a chunk that are %d or less together",
            *(limit, self.name, window, window - config.slack),
        )
        return config

    def _check_slab(self, config: SessionConfig) -> None:
        """Refuse a session whose slab does not fit memory: later it would fail, or be killed, in mid-turn."""
        from tenure.models.folder import free_memory

        slots = config.capacity or 0
        needed = slots * self.layout.token_bytes * (3 if self.config.rotate == "copy" else 2) // 2
        free = free_memory(str(self.layout.device)) if needed > _SMALL_SLAB else needed
        if needed > free:
            raise ConfigError(
                f"a slab of {slots:,} slots needs {needed / 1e9:,.1f} GB, {free / 1e9:,.1f} GB of memory are free",
                option="budget",
                way_out="Give a smaller budget or chunk, or fewer sessions at once",
            )

    @torch.inference_mode()
    def step(
        self,
        sessions: Iterable[Session],
        *,
        every_logit: bool = False,
        limits: Mapping[Session, int] | None = None,
    ) -> int:
        """One forward over what the sessions have waiting.

        Args:
            sessions: those to advance; the ones without waiting tokens are left out.
            limits: tokens of a session at most, below its chunk. A chunk that is computed in several steps is evicted
                from once, at its end.
            every_logit: give each session the logits of all its new tokens, not only of the last.

        Returns:
            Tokens computed.

        Raises:
            ConfigError: a session is another engine's; none has advanced.
        """
        most = limits or {}
        sessions = list(dict.fromkeys(sessions))
        if any(session.engine is not self for session in sessions):
            raise ConfigError(
                "a session belongs to another engine", option="sessions", way_out="Step it with its own"
            )
        batch = [(session, session.memory.take(most.get(session))) for session in sessions]
        batch = [(session, ids) for session, ids in batch if ids]
        if not batch:
            return 0
        work: list[Work] = []
        positions: list[Tensor] = []
        wanted: list[int] = []
        start = largest = 0
        for session, ids in batch:
            memory = session.memory
            with uninterrupted():
                memory.prepare(len(ids))
            work.append(memory.work(start, len(ids)))
            stop = start + len(ids)
            first = memory.ledger.next_position
            positions.append(torch.arange(first, first + len(ids)))
            largest = max(largest, first + len(ids))
            if every_logit:
                wanted += range(start, stop)
            elif memory.waiting == len(ids):
                wanted.append(stop - 1)
            start = stop
        logits = self._forward([ids for _, ids in batch], work, torch.cat(positions), largest, wanted)
        offset = 0
        with uninterrupted():
            for (session, ids), part in zip(batch, work, strict=True):
                rows = len(ids) if every_logit else int(session.memory.waiting == len(ids))
                session.advance(part, logits[offset : offset + rows])
                offset += rows
        self.heap.computed(start)
        return start

    def _forward(
        self,
        ids: Sequence[Sequence[int]],
        work: Sequence[Work],
        positions: Tensor,
        largest: int,
        wanted: list[int],
    ) -> Tensor:
        device = self.layout.device
        (cos, sin), others = self.adapter.turns(positions.to(device), largest=largest)
        forward = Forward(
            work=work, cos=cos, sin=sin, kernels=self.kernels, scale=self.adapter.scale, others=others
        )
        flat = torch.tensor([token for one in ids for token in one], device=device)
        return self.adapter.run(flat, forward, torch.tensor(wanted, dtype=torch.int64, device=device))

    @torch.inference_mode()
    def look(self, memory: Memory, ids: Sequence[int], watch: Watch, *, hide: int = 0) -> None:
        """Read tokens behind a session without entering them: only ``watch`` sees what they look at.

        Args:
            memory: of the session, with room for the tokens; at most one chunk.
            ids: the tokens.
            watch: see :class:`~tenure.cache.attend.Work`.
            hide: newest rows that the tokens do not see and whose places in memory they take; the rows are put back.
        """
        ledger, rows = memory.ledger, memory.rows
        if not hide:
            memory.prepare(len(ids))
        first = ledger.next_position - hide
        saved = rows.hide(hide)
        try:
            work = replace(memory.work(0, len(ids)), watch=watch, statistics=None)
            positions = torch.arange(first, first + len(ids))
            self._forward([ids], [work], positions, first + len(ids), [])
        finally:
            rows.unhide(saved)

    def drain(self, sessions: Sequence[Session]) -> None:
        """Step until no session has tokens waiting."""
        while self.step(sessions):
            pass

    def generate(self, sessions: Sequence[Session], **options: Any) -> list[str]:
        """One assistant turn for each session, in one batch.

        Args:
            sessions: distinct sessions; each may have tokens waiting from ``queue``.
            options: fields of :class:`~tenure.sampling.SamplingOptions`.

        Returns:
            The text of each turn, in order.
        """
        turns: list[Turn] = []
        with ExitStack() as closing:  # all of them, whatever the closing of one raises
            for session in sessions:
                turns.append(session.start_turn(**options))
                closing.callback(turns[-1].close)
            while any(not turn.done for turn in turns):
                self.step([turn.session for turn in turns if not turn.done])
        for turn in turns:
            turn.check()
        return [turn.text for turn in turns]


def compute_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ConfigError: it is none, or has no kernels.
        ModelError: there is no such device.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"{name!r} is no torch device", option="device", way_out="Give cpu or cuda"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("no CUDA device is visible", option="device", way_out="Use --device cpu")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{name!r} has no kernels here", option="device", way_out="Give cpu or cuda")
    return device


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of weights and cache, see :class:`~tenure.config.EngineConfig`."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cuda":
        with torch.cuda.device(device):
            known_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if known_bf16 else torch.float16
    known = capabilities()
    return torch.bfloat16 if known.get("avx512_bf16") or known.get("amx_bf16") else torch.float32
