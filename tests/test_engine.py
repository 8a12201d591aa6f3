"""Several sessions in one forward, and forwards that fail or are interrupted half-way."""

from __future__ import annotations

import copy
import signal
import threading

import pytest
import torch

from tenure import Engine, SessionConfig
from tenure.cache.attend import Forward, Singles
from tenure.config import EngineConfig
from tenure.engine import compute_dtype
from tenure.errors import ConfigError, ModelError
from tenure.interrupt import uninterrupted
from tenure.memory import Memory
from tests.chats import SHAPE, chat_engine, chat_session, encode, joint, system, tokenizer, user
from tests.conftest import random_ids, stock_logits
from tests.oracles import Script, check_ledger, state_of

CONFIGS = [
    {"policy": "full", "positions": "logical", "chunk": 32},
    {"policy": "h2o", "positions": "bounded", "budget": 40, "chunk": 16, "slack": 6, "limit": 64},
    {"policy": "recency", "positions": "compact", "budget": 24, "chunk": 7, "slack": 3},
    {
        "policy": "snapkv",
        "positions": "logical",
        "budget": 32,
        "chunk": 64,
        "slack": 5,
        "granularity": "session",
    },
    {"policy": "tova", "positions": "bounded", "budget": 20, "chunk": 11, "slack": 8},
    {
        "policy": "random",
        "positions": "compact",
        "budget": 30,
        "chunk": 5,
        "slack": 2,
        "granularity": "layer",
    },
    {"policy": "foresight", "positions": "bounded", "budget": 48, "chunk": 24, "slack": 4, "sinks": 2},
]
WORDS = "The quick brown fox jumps over the lazy dog and reads a file about sharks "


def prompts(round_number):
    """A text of another length for each session."""
    return [WORDS * (1 + (number + round_number) % 4) + str(number) for number in range(len(CONFIGS))]


def same(batched, alone):
    """Everything that the engine computes of a session agrees."""
    assert batched.memory.ids == alone.memory.ids
    one, two = batched.memory.ledger, alone.memory.ledger
    rows = one.rows
    assert (rows, one.next_position, one.renumbers) == (two.rows, two.next_position, two.renumbers)
    assert torch.equal(one.logical[:, :rows], two.logical[:, :rows])
    assert torch.equal(one.position[:, :rows], two.position[:, :rows])
    torch.testing.assert_close(one.score[:, :rows], two.score[:, :rows], atol=1e-4, rtol=1e-4)
    for name in ("raw", "values"):
        torch.testing.assert_close(
            getattr(batched.memory.rows, name)[:, :, :rows],
            getattr(alone.memory.rows, name)[:, :, :rows],
            atol=1e-4,
            rtol=1e-4,
        )
    if batched.logits is not None:
        torch.testing.assert_close(batched.logits, alone.logits, atol=1e-4, rtol=0)
    check_ledger(batched)


# -- batches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("executor", "rotate"), [("fused", "copy"), ("fused", "read"), ("transformers", "copy")]
)
def test_a_batch_equals_each_session_alone(engines, executor, rotate):
    """Seven sessions of other policies, maps, budgets and chunks, over three turns of prompts and answers."""
    engine = engines("qwen3", tokenizer=tokenizer("chatml"), executor=executor, rotate=rotate, **SHAPE)
    batch = [engine.session(**config) for config in CONFIGS]
    alone = [engine.session(**config) for config in CONFIGS]
    for round_number in range(3):
        for sessions in (batch, alone):
            for session, text in zip(sessions, prompts(round_number), strict=True):
                session.queue([user(text)], reply=True)
        texts = engine.generate(batch, max_tokens=9)
        assert texts == [engine.generate([session], max_tokens=9)[0] for session in alone]
        for one, two in zip(batch, alone, strict=True):
            same(one, two)


def test_prefill_chunks_and_decode_tokens_in_one_forward(engines):
    """Sessions answer while others are still reading: steps mix chunks of 5, 11, 16 with single tokens."""
    engine = chat_engine(engines)
    batch = [engine.session(**config) for config in CONFIGS]
    alone = [engine.session(**config) for config in CONFIGS]
    for number, session in enumerate(batch):
        session.queue([user(WORDS * number + "go")], reply=True)
    turns = [session.start_turn(max_tokens=6 + 2 * number) for number, session in enumerate(batch)]
    mixed = 0
    while any(not turn.done for turn in turns):
        open_turns = [turn for turn in turns if not turn.done]
        kinds = {len(turn.session.memory.take()) == 1 for turn in open_turns}
        mixed += len(kinds) == 2
        computed = engine.step([turn.session for turn in open_turns])
        assert computed > 0
    for turn in turns:
        turn.close()
    assert mixed >= 5
    for number, (session, turn) in enumerate(zip(alone, turns, strict=True)):
        session.queue([user(WORDS * number + "go")], reply=True)
        text = engine.generate([session], max_tokens=6 + 2 * number)[0]
        assert text == turn.text
        same(turn.session, session)


def test_every_logit_of_a_batch(engines, models):
    engine = engines("qwen2")
    sessions = [engine.session(policy="full", chunk=chunk) for chunk in (8, 5, 64)]
    ids = [random_ids(20, seed=number) for number in range(3)]
    for session, own in zip(sessions, ids, strict=True):
        session.queue_ids(own)
    got = [[], [], []]
    while engine.step(sessions, every_logit=True):
        for session, rows in zip(sessions, got, strict=True):
            if len(session) and session.logits is not None:
                rows.append((len(session), session.logits.clone()))
    for own, rows in zip(ids, got, strict=True):
        want = stock_logits(models("qwen2"), own)
        for length, logits in rows:
            torch.testing.assert_close(logits, want[length - 1], atol=1e-4, rtol=0)


def test_far_positions_of_one_session_leave_the_others(engines, models):
    """Angles are taken in fp64 for the whole pack as soon as one session is far ahead."""
    engine = engines("qwen2")
    far, near = (engine.session(policy="full", positions="logical") for _ in range(2))
    far.memory.ledger.next_position = 40_000
    ids = random_ids(30)
    for session in (far, near):
        session.queue_ids(ids)
    engine.step([far, near])
    want = stock_logits(models("qwen2"), ids)[-1]
    torch.testing.assert_close(near.logits, want, atol=1e-4, rtol=0)
    torch.testing.assert_close(far.logits, want, atol=1e-3, rtol=0)


@pytest.mark.parametrize("policy", ["foresight", "h2o", "recency"])
def test_a_chunk_cut_into_steps_ends_like_one_step(engines, policy):
    engine = engines("llama")
    whole, cut = (engine.session(policy=policy, budget=48, chunk=32, slack=8) for _ in range(2))
    ids = random_ids(150)
    for session in (whole, cut):
        session.queue_ids(ids)
    sizes = iter([1, 7, 40, 3, 32, 5, 5, 5, 100, 1] + [13] * 20)
    while whole.memory.waiting:
        engine.step([whole])
    most = 0
    while cut.memory.waiting:
        most = max(most, engine.step([cut], limits={cut: next(sizes)}))
        assert cut.memory.ledger.rows <= cut.config.capacity
    assert most <= 32
    check_ledger(cut)
    assert cut.memory.ledger.evicted_ever == whole.memory.ledger.evicted_ever
    if policy == "recency":  # the others observe attention a forward
        assert torch.equal(cut.memory.ledger.logical[:, :48], whole.memory.ledger.logical[:, :48])
        torch.testing.assert_close(cut.logits, whole.logits, atol=1e-4, rtol=0)


def test_a_step_takes_each_session_once(engines):
    engine = engines("qwen2")
    session, idle = engine.session(policy="full"), engine.session(policy="full")
    assert engine.step([session, idle]) == 0
    assert engine.step([]) == 0
    session.queue_ids(random_ids(10))
    assert engine.step([session, session, idle]) == 10
    assert len(session) == 10
    assert len(idle) == 0
    assert engine.step(iter([session])) == 0
    check_ledger(session)


def test_one_session_can_stop_before_another(engines, monkeypatch):
    engine = chat_engine(engines)
    short, long = (engine.session(policy="full") for _ in range(2))
    stop = tokenizer("chatml").eos_token_id
    queue = [[*encode("chatml", "no"), stop], encode("chatml", "a much longer answer than that")]
    monkeypatch.setattr("tenure.turn.Sampler", lambda options, stop_ids: Script(queue.pop(0)))
    short.queue(["Hi"], reply=True)
    long.queue(["Hello there"], reply=True)
    texts = engine.generate([short, long], max_tokens=7)
    assert texts[0] == "no"
    assert texts[1] == tokenizer("chatml").decode(encode("chatml", "a much longer answer than that")[:7])
    for session in (short, long):
        session.append("next")
        check_ledger(session)


def test_sampling_of_a_batch_is_that_of_each_session(engines):
    engine = chat_engine(engines)
    options = {"max_tokens": 10, "temperature": 3.0, "top_p": 0.95, "seed": 5}

    def asked():
        session = engine.session(policy="full")
        session.queue([user("Hi")], reply=True)
        return session

    together = engine.generate([asked(), asked()], **options)
    assert together == [engine.generate([asked()], **options)[0]] * 2


# -- forwards that break -----------------------------------------------------------------------------


class Breaker:
    """Raises inside the attention of one layer of one forward."""

    def __init__(self, monkeypatch, error):
        self.error, self.forward, self.layer, self.seen = error, None, 0, -1
        self.inside = False
        for kind in (Forward, Singles):

            def broken(this, layer, *args, _original=kind.attend):
                if self.inside:  # single tokens beside a text are a part of its forward
                    return _original(this, layer, *args)
                self.seen += layer == 0
                if self.seen == self.forward and layer == self.layer:
                    self.forward = None
                    if isinstance(self.error, signal.Signals):
                        signal.raise_signal(self.error)
                    else:
                        raise self.error("in the middle of a forward")
                self.inside = True
                try:
                    return _original(this, layer, *args)
                finally:
                    self.inside = False

            monkeypatch.setattr(kind, "attend", broken)

    def arm(self, forward, layer):
        """Break at a layer of the coming forward number ``forward``."""
        self.forward, self.layer, self.seen = forward, layer, -1


BREAKS = [
    (RuntimeError, RuntimeError),
    (KeyboardInterrupt, KeyboardInterrupt),
    (signal.SIGINT, KeyboardInterrupt),
]
breaks = pytest.mark.parametrize(("error", "raised"), BREAKS, ids=["error", "raised", "SIGINT"])


@breaks
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["policy"])
def test_a_broken_append_goes_on_where_it_stopped(engines, monkeypatch, config, layer, error, raised):
    engine = chat_engine(engines)
    session, other = engine.session(**config), engine.session(**config)
    for one in (session, other):
        one.append([system(WORDS), user(WORDS * 2)])
    breaker = Breaker(monkeypatch, error)
    breaker.arm(forward=min(2, 100 // config["chunk"] - 1), layer=layer)
    before = state_of(session)
    with pytest.raises(raised):
        session.append([user(WORDS * 4)])
    assert breaker.forward is None
    check_ledger(session)
    assert len(session) >= len(before["ids"]) // 4
    assert session.memory.waiting > 0
    engine.drain([session])
    other.append([user(WORDS * 4)])
    # To the bit: the computation that broke left nothing behind.
    left, right = state_of(session), state_of(other)
    assert {k: v for k, v in left.items() if k != "renumbers"} == {
        k: v for k, v in right.items() if k != "renumbers"
    }
    assert session.ask("And?", max_tokens=4) == other.ask("And?", max_tokens=4)
    check_ledger(session)


@breaks
def test_a_forward_that_breaks_changes_nothing(engines, monkeypatch, error, raised):
    """The first chunk of a message: all but the backlog is byte-identical, and that can be given up."""
    engine = chat_engine(engines)
    session = engine.session(**CONFIGS[1])
    session.append([system(WORDS)])
    before = state_of(session)
    queued = session.fork()
    queued.queue([user(WORDS)])
    want = state_of(queued)
    breaker = Breaker(monkeypatch, error)
    for layer in (0, 1):
        twin = session.fork()
        breaker.arm(0, layer)
        with pytest.raises(raised):
            twin.append([user(WORDS)])
        assert state_of(twin) == want
        twin.keep_first(len(twin))
        assert {**state_of(twin), "logits": before["logits"]} == before
        twin.append([user("Another way.")])
        assert twin.memory.ids.tolist() == joint("chatml", [system(WORDS), user("Another way.")])
        check_ledger(twin)
    assert state_of(session) == before


@breaks
@pytest.mark.parametrize("number", [0, 1, 4])
@pytest.mark.parametrize("config", CONFIGS[:3], ids=lambda config: config["policy"])
def test_a_broken_answer_is_a_cancelled_one(engines, monkeypatch, config, number, error, raised):
    """What was produced stays; the next turn is that of a session whose answer was just as short."""
    engine = chat_engine(engines)
    session, other = engine.session(**config), engine.session(**config)
    for one in (session, other):
        one.append([user(WORDS)])
        one.queue([user("Say it.")], reply=True)
        engine.drain([one])
    breaker = Breaker(monkeypatch, error)
    turn = session.generate(max_tokens=20)
    breaker.arm(number, 1)
    with pytest.raises(raised):
        "".join(turn)
    assert turn.reason == "cancel"
    assert len(turn.ids) == number + 1
    check_ledger(session)
    short = other.generate(max_tokens=number + 1)
    assert "".join(short) == turn.text
    assert session.ask("And now?", max_tokens=6) == other.ask("And now?", max_tokens=6)
    assert session.memory.ids == other.memory.ids
    torch.testing.assert_close(session.logits, other.logits)
    check_ledger(session)


@breaks
def test_a_broken_batch_leaves_all_sessions_usable(engines, monkeypatch, error, raised):
    engine = chat_engine(engines)
    batch, alone = ([engine.session(**config) for config in CONFIGS[:4]] for _ in range(2))
    for session in batch + alone:
        session.append([user(WORDS)])
    breaker = Breaker(monkeypatch, error)
    breaker.arm(3, 0)
    with pytest.raises(raised):
        engine.generate(batch, max_tokens=30)
    for session in batch:
        check_ledger(session)
        assert session._turn is None
    lengths = {
        len(session) + session.memory.waiting - len(one) for session, one in zip(batch, alone, strict=True)
    }
    assert len(lengths) == 1, "all have produced as much"
    again = engine.generate(batch, max_tokens=5)
    assert len(again) == 4
    for session in batch:
        session.append("next")
        check_ledger(session)


def test_ctrl_c_waits_until_all_sessions_have_committed(engines, monkeypatch):
    """SIGINT while the arrays of the first session change: the second is not left behind."""
    engine = chat_engine(engines)
    first, second = (engine.session(**CONFIGS[1]) for _ in range(2))
    for session in (first, second):
        session.queue([user("Hi")])
    commit, calls = Memory.commit, []

    def interrupted(self, *args, **kwargs):
        calls.append(self)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        commit(self, *args, **kwargs)

    monkeypatch.setattr(Memory, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step([first, second])
    assert calls == [first.memory, second.memory]
    assert first.memory.ids == second.memory.ids
    assert len(first) == 16 == len(second)
    for session in (first, second):
        check_ledger(session)


@pytest.mark.parametrize("place", ["keep", "renumber", "stage", "truncate"])
def test_ctrl_c_never_splits_ledger_and_rows(engines, monkeypatch, place):
    """Wherever the ledger has just changed, the rows follow before the interrupt gets through."""
    from tenure.ledger import Ledger

    engine = chat_engine(engines)
    session = engine.session(policy="h2o", positions="compact", budget=24, chunk=8, slack=4)
    original, armed = getattr(Ledger, place), [True]

    def interrupting(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        if self is session.memory.ledger and armed and self.rows > 16:
            armed.clear()
            signal.raise_signal(signal.SIGINT)
        return result

    session.append([user(WORDS)])
    monkeypatch.setattr(Ledger, place, interrupting)
    calls = {"truncate": lambda: session.drop_last(1)}
    with pytest.raises(KeyboardInterrupt):
        calls.get(place, lambda: session.append([user(WORDS)]))()
    check_ledger(session)
    engine.drain([session])
    check_ledger(session)
    assert session.ask("And?", max_tokens=5) is not None
    check_ledger(session)


def test_an_interrupt_in_the_sampler_leaves_a_cancelled_turn(engines, monkeypatch):
    session = chat_session(engines, policy="h2o", budget=64, chunk=16, slack=4)
    session.append([user("Hi")])

    class Interrupting(Script):
        def __call__(self, logits):
            if len(self.logits) == 2:
                signal.raise_signal(signal.SIGINT)
            return super().__call__(logits)

    Interrupting(encode("chatml", "one two three four")).install(monkeypatch)
    turn = session.generate()
    with pytest.raises(KeyboardInterrupt):
        "".join(turn)
    assert turn.reason == "cancel"
    assert len(turn.ids) == 3, "the token that was being drawn counts"
    check_ledger(session)
    session.append([user("And?")])
    assert turn.text in tokenizer("chatml").decode(session.memory.ids)
    check_ledger(session)


def test_a_sampler_that_fails_takes_no_other_session_along(engines, monkeypatch):
    engine = chat_engine(engines)
    sessions = [engine.session(**CONFIGS[1]) for _ in range(3)]
    alone = engine.session(**CONFIGS[1])
    for session in (*sessions, alone):
        session.queue([user("Hi")], reply=True)
    made = []

    class Failing(Script):
        def __call__(self, logits):
            if len(self.logits) == 3 and made[1:2] == [self]:
                raise ModelError("no numbers")
            return super().__call__(logits)

    words = encode("chatml", "one two three four five six")
    monkeypatch.setattr(
        "tenure.turn.Sampler", lambda options, stop_ids: made.append(Failing(words)) or made[-1]
    )
    with pytest.raises(ModelError, match="no numbers"):
        engine.generate(sessions, max_tokens=4)
    for session in sessions:
        check_ledger(session)
    made.clear()
    assert engine.generate([alone], max_tokens=4)
    alone.append("next")
    sessions[0].append("next")
    assert sessions[0].memory.ids == alone.memory.ids
    sessions[2].append("next")
    assert sessions[2].memory.ids == alone.memory.ids, "the others go on"
    sessions[1].append("next")
    assert len(sessions[1]) == len(alone) - 1, "its fourth token was not drawn"
    for session in sessions:
        check_ledger(session)


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()], ids=repr)
def test_a_turn_that_cannot_be_closed_leaves_the_others_usable(engines, monkeypatch, error):
    engine = chat_engine(engines)
    sessions = [engine.session(**CONFIGS[1]) for _ in range(3)]
    for number, session in enumerate(sessions):
        session.queue([user("Hi", step=f"step-{number}")], reply=True)

    def failing(self, step):
        if step != "step-2":
            raise type(error)(f"not {step}")

    with monkeypatch.context() as patch:
        patch.setattr("tenure.plan.Plan.finish", failing)
        with pytest.raises(type(error), match="not step-0"):
            engine.generate(sessions, max_tokens=3)
    for session in sessions:
        assert session._turn is None
        assert session._step is None
        check_ledger(session)
    assert len(engine.generate(sessions, max_tokens=3)) == 3


@breaks
def test_sync_after_a_broken_append(engines, models, monkeypatch, error, raised):
    """What is left waiting belongs to no conversation any more."""
    session = chat_session(engines, policy="full", chunk=16)
    history = [system(WORDS), user(WORDS * 2)]
    breaker = Breaker(monkeypatch, error)
    breaker.arm(1, 0)
    with pytest.raises(raised):
        session.append([*history, user("And this?", pin="hard", span="this")])
    assert session.memory.waiting > 0
    cached = session.sync([*history, user("Rather that.", span="this")])
    assert cached == 16
    want = joint("chatml", [*history, user("Rather that.")], prompt=True)
    assert session.memory.ids.tolist() == want
    torch.testing.assert_close(
        session.logits, stock_logits(models("qwen2", **SHAPE), want)[-1], atol=1e-4, rtol=0
    )
    check_ledger(session)


# -- uninterrupted -----------------------------------------------------------------------------------


def test_sigint_is_held_back_to_the_end_of_the_block():
    done = []

    def block():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append(1)
            signal.raise_signal(signal.SIGINT)
            done.append(2)
        done.append("never")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == [1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nested_blocks_end_with_the_outer_one():
    done = []

    def blocks():
        with uninterrupted():
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")
        done.append("never")

    with pytest.raises(KeyboardInterrupt):
        blocks()
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_in_the_block_restores_the_handler():
    with pytest.raises(ZeroDivisionError), uninterrupted():
        1 / 0  # noqa: B018
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_callers_own_is_called_once():
    seen = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            assert seen == []
        assert seen == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)  # ignored stays ignored
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


def test_other_threads_do_not_touch_signals():
    seen = []

    def work():
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


# -- opening sessions --------------------------------------------------------------------------------


def test_options_of_a_session(engines):
    engine = engines("qwen2")
    base = SessionConfig(budget=64, chunk=16, slack=4, policy="h2o")
    assert engine.session(base, sinks=2).config.sinks == 2
    assert engine.session(base).config == base
    assert engine.session(base, policy="full").config.budget is None
    assert engine.session(policy="full").config.budget is None
    assert engine.session().config == SessionConfig()
    with pytest.raises(ConfigError, match="bugdet"):
        engine.session(bugdet=3)
    with pytest.raises(ConfigError, match="needs a budget"):
        engine.session(budget=None)
    with pytest.raises(ConfigError, match="policy 'full'"):
        engine.session(policy="full", budget=64)


def test_end_of_text_ids_are_the_models_and_the_tokenizers(models):
    """Qwen2.5 names two of them in its generation config; ids that are plain text are none."""
    model = copy.deepcopy(models("qwen2", **SHAPE))
    for named, want in (([0, 2, 50], {0, 2}), (1, {1, 2}), (None, {2}), ([], {2}), (300, {2})):
        model.generation_config.eos_token_id = named
        engine = Engine(copy.deepcopy(model), tokenizer("chatml"))
        assert engine.eos_ids == want
        assert engine.session(policy="full").stop_ids >= want
    assert Engine(copy.deepcopy(model)).eos_ids == frozenset()


def test_a_model_serves_one_engine(models):
    model = copy.deepcopy(models("qwen2"))
    Engine(model)
    with pytest.raises(ModelError, match="Load it again"):
        Engine(model)


def test_unknown_devices_and_dtypes():
    for options, option in (
        ({"dtype": "fp8"}, "dtype"),
        ({"threads": 0}, "threads"),
        ({"rotate": "x"}, "rotate"),
    ):
        with pytest.raises(ConfigError) as caught:
            EngineConfig(**options)
        assert caught.value.option == option
    for name, kind in (("warp", ConfigError), ("meta", ConfigError)):
        with pytest.raises(kind, match="device"):
            Engine.load("smollm2-135m", device=name)
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="no CUDA device"):
            Engine.load("smollm2-135m", device="cuda")
    cpu = torch.device("cpu")
    assert compute_dtype("fp32", cpu) is torch.float32
    assert compute_dtype("bf16", cpu) is torch.bfloat16
    assert compute_dtype("auto", cpu) in (torch.bfloat16, torch.float32)


def test_bf16_sessions(models):
    """The dtype of every slab is the model's; scores and logits are fp32; nothing is NaN."""
    engine = Engine(copy.deepcopy(models("qwen3", **SHAPE)).to(torch.bfloat16), tokenizer("chatml"))
    session = engine.session(policy="h2o", budget=32, chunk=16, slack=4)
    session.ask(WORDS, max_tokens=12)
    assert session.memory.rows.raw.dtype == torch.bfloat16
    assert session.memory.ledger.score.dtype == torch.float32
    session.append("next")
    assert session.logits.dtype == torch.float32
    check_ledger(session)


# -- positions that the model was trained on -----------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "chunk", "limit", "window"),
    [(32, 20, None, 60), (32, 20, 64, 64), (16, 8, None, 32)],
    ids=["the window", "chosen", "a power of two"],
)
def test_bounded_positions_stay_where_the_model_was_trained(models, caplog, budget, chunk, limit, window):
    model = copy.deepcopy(models("qwen2", max_position_embeddings=60))
    session = Engine(model).session(budget=budget, chunk=chunk, slack=4, limit=limit)
    assert session.config.position_limit == window
    session.append_ids(random_ids(300))
    assert session.memory.ledger.next_position <= window
    assert not caplog.records


def test_positions_beyond_those_a_model_was_trained_on_are_told(models, caplog):
    model = copy.deepcopy(models("qwen2", max_position_embeddings=60))
    session = Engine(model, name="small").session(budget=64, chunk=16, slack=4)
    assert session.config.position_limit == 128
    assert "positions will reach 128, small was trained on 60" in caplog.text
