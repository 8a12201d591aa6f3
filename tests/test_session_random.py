"""Random chats: whatever comes in whatever order, O1 and O3 hold after every call, and refusals change nothing."""

from __future__ import annotations

import contextlib
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tenure import Engine
from tenure.cache.attend import Forward
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
    {"policy": "h2o", "budget": 40, "chunk": 16, "slack": 4, "limit": 64},
    {"policy": "recency", "positions": "compact", "budget": 24, "chunk": 9, "slack": 2, "sinks": 1},
    {"policy": "foresight", "positions": "logical", "budget": 32, "chunk": 16, "slack": 3},
]


@cache
def model():
    return tiny_model("qwen2", **SHAPE)


@cache
def engine(template):
    return Engine(tiny_model("qwen2", **SHAPE), tokenizer(template))


messages = st.lists(
    st.builds(
        lambda role, text, span, pin, step: {
            "role": role,
            "content": text,
            "span": span,
            "pin": pin,
            "step": step,
            "reads": ["a"] if step else [],
        },
        st.sampled_from(ROLES),
        st.sampled_from(TEXTS),
        st.sampled_from([None, None, None, "a", "b", "user-2"]),
        st.sampled_from([None, None, None, "soft", "hard"]),
        st.sampled_from([None, None, "one", "two"]),
    ),
    min_size=0,
    max_size=3,
)
scripts = st.lists(st.integers(0, 439), min_size=1, max_size=8)


class ChatMachine(RuleBasedStateMachine):
    @initialize(
        template=st.sampled_from(["chatml", "tools", "reasoning", "strict", "headers"]),
        memory=st.sampled_from(MEMORIES),
    )
    def start(self, template, memory):
        self.session = engine(template).session(**memory)
        self.template = template
        self.others = []
        self.patch = pytest.MonkeyPatch()

    def attempt(self, call):
        """Run a call; what Tenure refuses must leave the session as it was."""
        before = state_of(self.session)
        try:
            return call()
        except TenureError:
            assert state_of(self.session) == before
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
    )
    def generate(self, ids, stop, most, leave):
        stops = sorted(engine(self.template).session(policy="full").stop_ids)
        Script([*ids, *stops * 9]).install(self.patch)

        def call():
            turn = self.session.generate(stop=stop, max_tokens=most)
            for count, _ in enumerate(turn, 1):
                if count == leave:
                    break
            turn.close()
            assert len(turn.ids) <= most
            assert turn.reason in ("stop", "length", "cancel")
            assert not any(text in turn.text for text in stop)

        self.attempt(call)
        assert self.session._turn is None

    @rule(share=st.floats(0, 1))
    def keep_first(self, share):
        self.session.keep_first(round(share * len(self.session)))

    @rule(count=st.integers(-1, 12))
    def drop_last(self, count):
        self.attempt(lambda: self.session.drop_last(count))

    @rule(ids=scripts, pin=st.sampled_from([None, "hard"]))
    def append_ids(self, ids, pin):
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

    @rule()
    def fork(self):
        if len(self.others) < 3:
            self.others.append((self.session, state_of(self.session)))
            self.session = self.session.fork()

    @invariant()
    def holds(self):
        if not hasattr(self, "session"):
            return
        session = self.session
        check_ledger(session)
        if session.logits is not None:
            assert session.logits.isfinite().all()
            if session.config.policy == "full":
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
    max_examples=60,
    stateful_step_count=14,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
