"""Random chats: whatever comes in whatever order, O1 and O3 hold after every call, and refusals change nothing."""

from __future__ import annotations

import contextlib
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tenure import Engine, Step
from tenure.cache.attend import Forward
from tenure.config import EngineConfig
from tenure.errors import TenureError
from tests.chats import SHAPE, tokenizer
from tests.conftest import stock_logits, tiny_model
from tests.oracles import Script, check_ledger, state_of

TEXTS = [
    "a",
    "The quick brown fox",
    "<|im_end|>\n",
    "\n",
    " é 한",
    "x" * 40,
    "",
    "<think>\nhm\n</think>\n\nyes",
    "0 1 2",
]
ROLES = ["user", "user", "user", "assistant", "tool", "system"]
MEMORIES = [
    {"policy": "full", "positions": "logical", "chunk": 16},
    {"policy": "full", "positions": "bounded", "chunk": 7},
    {"policy": "h2o", "budget": 40, "chunk": 16, "slack": 4, "limit": 64, "pins": "demote"},
    {"policy": "recency", "positions": "compact", "budget": 24, "chunk": 9, "slack": 2, "pins": "spill"},
    {"policy": "foresight", "positions": "logical", "budget": 32, "chunk": 16, "slack": 3},
    {"policy": "auto", "budget": 40, "chunk": 12, "slack": 4, "pins": "spill", "planner": "explicit"},
    {"policy": "memdecay", "positions": "compact", "budget": 36, "chunk": 16, "slack": 4, "pins": "demote"},
]
READS = [[], ["a"], ["b", "user-2"], [{"quote": "quick"}], [{"message": 1}, "a"]]


@cache
def model():
    return tiny_model("qwen2", **SHAPE)


@cache
def engine(template):
    """Its tier is small, so that some of what was evicted does not come back."""
    return Engine(
        tiny_model("qwen2", **SHAPE), tokenizer(template), config=EngineConfig(tiers=("host:256KB",))
    )


messages = st.lists(
    st.builds(
        lambda role, text, span, pin, step, reads: {
            "role": role,
            "content": text,
            "span": span,
            "pin": pin,
            "step": step,
            "reads": reads if step else [],
        },
        st.sampled_from(ROLES),
        st.sampled_from(TEXTS),
        st.sampled_from([None] * 9 + [*"abcdef", "user-2"]),
        st.sampled_from([None] * 4 + ["soft", "hard"]),
        st.sampled_from([None, None, "one", "two"]),
        st.sampled_from(READS),
    ),
    min_size=1,
    max_size=3,
)
scripts = st.lists(st.integers(0, 439), min_size=1, max_size=8)
places = st.integers(0, 30)


def holds_tokens(machine):
    return len(machine.session) > 0


class ChatMachine(RuleBasedStateMachine):
    @initialize(
        template=st.sampled_from(["chatml", "tools", "reasoning", "strict", "headers"]),
        memory=st.sampled_from(MEMORIES),
        begun=st.sampled_from([True, True, True, False]),
    )
    def start(self, template, memory, begun):
        self.session = engine(template).session(**memory)
        if begun:  # most calls need something to work on
            self.session.append({"role": "user", "content": "x" * 40, "span": "begun"})
        self.template = template
        self.others = []
        self.compressed = False
        self.asked = 0
        self.patch = pytest.MonkeyPatch()

    def attempt(self, call, besides=()):
        """Run a call; what Tenure refuses must leave the session as it was, besides some of its state."""
        before = state_of(self.session)
        try:
            return call()
        except TenureError:
            after = state_of(self.session)
            for name in besides:
                before.pop(name), after.pop(name)
            assert after == before
            return None

    @rule(new=messages)
    def append(self, new):
        self.attempt(lambda: self.session.append(new))

    @rule(new=messages, reply=st.booleans())
    def queue(self, new, reply):
        self.attempt(lambda: self.session.queue(new, reply=reply))

    @rule(new=messages, reply=st.booleans())
    def sync(self, new, reply):
        cached = self.attempt(lambda: self.session.sync(new, reply=reply))
        if cached is not None:
            twin = engine(self.template).session(policy="full")
            twin.sync(new, reply=reply)
            assert self.session.memory.ids == twin.memory.ids
            assert cached <= len(twin)

    @rule(
        ids=scripts,
        stop=st.sampled_from([(), ("x",), ("e ",), ("1 2", "fox")]),
        most=st.integers(1, 9),
        leave=st.integers(1, 12),
        back=st.sampled_from([None, None, 0, 1]),
    )
    def generate(self, ids, stop, most, leave, back):
        """Sometimes from where the last turn began once more, or from right before it."""
        if back is not None and back < self.asked <= len(self.session):
            self.session.keep_first(self.asked - back)
        stops = sorted(engine(self.template).session(policy="full").stop_ids)
        Script([*ids, *stops * 9]).install(self.patch)

        def call():
            turn = self.session.generate(stop=stop, max_tokens=most)
            self.asked = turn._start
            for count, _ in enumerate(turn, 1):
                if count == leave:
                    break
            turn.close()
            assert len(turn.ids) <= most
            assert turn.reason in ("stop", "length", "cancel")
            assert not any(text in turn.text for text in stop)

        self.attempt(call)
        assert self.session._turn is None

    @precondition(holds_tokens)
    @rule(share=st.floats(0, 1))
    def keep_first(self, share):
        self.session.keep_first(round(share * len(self.session)))

    @precondition(holds_tokens)
    @rule(count=st.sampled_from([-1, 0, 1, 2, 3, 5, 8, 12]))
    def drop_last(self, count):
        self.attempt(lambda: self.session.drop_last(count))

    @rule(share=st.sampled_from([0.02, 0.2, 0.6]), pin=st.sampled_from([None, "hard", "hard"]))
    def append_ids(self, share, pin):
        """As large as that share of a budget: two pins of more than a half do not fit it."""
        ids = [7 * place % 440 for place in range(round(share * (self.session.config.budget or 40)) or 1)]
        self.attempt(lambda: self.session.append_ids(ids, pin=pin))

    @rule(new=messages, layer=st.integers(0, 1))
    def break_a_forward(self, new, layer):
        with pytest.MonkeyPatch.context() as patch:
            attend = Forward.attend

            def broken(this, at, *rest):
                if at == layer:
                    raise KeyboardInterrupt
                return attend(this, at, *rest)

            patch.setattr(Forward, "attend", broken)
            with contextlib.suppress(KeyboardInterrupt, TenureError):
                self.session.append(new)

    def span_at(self, place):
        """The id of some span of a session that is not empty."""
        spans = self.session.memory.ledger.spans
        return spans[place % len(spans)].id

    @precondition(holds_tokens)
    @rule(wanted=st.lists(places, min_size=1, max_size=4))
    def fetch(self, wanted):
        ids = self.session.memory.ids.tolist()
        for name in self.session.fetch([self.span_at(place) for place in wanted]):
            assert self.session.explain(name).resident == 1.0
        assert self.session.memory.ids.tolist() == ids

    @precondition(holds_tokens)
    @rule(place=places, ratio=st.sampled_from([1.5, 4]), method=st.sampled_from(["streaming", "snapkv"]))
    def compress(self, place, ratio, method):
        self.session.engine.drain([self.session])
        name = self.span_at(place)
        renumbered = ("position", "rotated", "next_position", "renumbers", "compressed")
        done = self.attempt(
            lambda: self.session.compress(name, ratio=ratio, method=method, recent=2), besides=renumbered
        )
        self.compressed = self.compressed or done is not None

    @precondition(holds_tokens)
    @rule(
        how=st.sampled_from(["add", "set", "begin", "finish", "turn"]),
        step=st.sampled_from(["one", "two"]),
        place=places,
    )
    def plan(self, how, step, place):
        plan, name = self.session.plan, self.span_at(place)
        if step not in plan:
            plan.add(Step(step))
        {
            "add": lambda: plan.add_reads(step, [name]),
            "set": lambda: plan.set_reads(step, [name]),
            "begin": lambda: plan.begin(step),
            "finish": lambda: plan.finish(step),
            "turn": lambda: plan.add_turn_reads([name]),
        }[how]()

    @rule()
    def save(self):
        with tempfile.TemporaryDirectory() as folder:
            self.session.save(Path(folder) / "one")
            again = self.session.engine.restore(Path(folder) / "one")
        assert state_of(again) == state_of(self.session)
        self.leave(again)

    def leave(self, session):
        """Go on with another session; what happens to it must leave the old one alone."""
        if len(self.others) < 3:
            self.others.append((self.session, state_of(self.session)))
        self.session = session

    @rule()
    def fork(self):
        self.leave(self.session.fork())

    @invariant()
    def holds(self):
        if not hasattr(self, "session"):
            return
        session = self.session
        check_ledger(session)
        if session.logits is not None:
            assert session.logits.isfinite().all()
            if session.config.policy == "full" and not self.compressed:
                want = stock_logits(model(), session.memory.ids.tolist())[-1]
                torch.testing.assert_close(session.logits, want, atol=2e-4, rtol=0)
        for other, state in self.others:
            assert state_of(other) == state

    def teardown(self):
        if not hasattr(self, "session"):
            return
        self.patch.undo()
        self.session.engine.drain([self.session])
        check_ledger(self.session)
        for span in self.session.memory.ledger.spans:
            self.session.explain(span.id)
        self.session.stats()
        self.session.close()


TestChat = ChatMachine.TestCase
TestChat.settings = settings(
    max_examples=80,
    stateful_step_count=14,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
