"""Survival estimates against known lives and another library; traces against the stock model's own attention."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from tenure.bench.calibration import survival, transcripts
from tenure.bench.calibration.trace import Lifetimes, join, trace
from tenure.errors import ConfigError, SessionFileError
from tenure.messages import Message
from tenure.region_table import load_regions
from tests.chats import assistant, chat_engine, encode, joint, system, tokenizer, user


def lives_of(half_life: float, count: int, seed: int, *, shape: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Weibull lives of a known half-life, about half of them cut off by an end drawn from the same law."""
    rng = np.random.default_rng(seed)
    scale = half_life / math.log(2) ** (1 / shape)
    life, end = scale * rng.weibull(shape, count), scale * rng.weibull(shape, count)
    return np.minimum(life, end), life <= end


@pytest.mark.parametrize("half_life", [15.0, 160.0])
def test_kaplan_meier_recovers_a_half_life_with_half_censored(half_life) -> None:
    time, died = lives_of(half_life, 8000, seed=1)
    assert 0.45 < died.mean() < 0.55
    assert survival.median(time, died) == pytest.approx(half_life, rel=0.06)
    assert survival.exponential(time, died) == pytest.approx(half_life, rel=0.06)
    naive = float(np.median(time[died]))
    assert naive < 0.7 * half_life, "without censoring it would be far off"


def test_weibull_recovers_shape_and_scale() -> None:
    time, died = lives_of(40.0, 3000, seed=2, shape=0.6)
    shape, scale = survival.weibull(time, died)
    assert shape == pytest.approx(0.6, rel=0.08)
    assert scale * math.log(2) ** (1 / shape) == pytest.approx(40.0, rel=0.1)


def test_the_curve_is_the_product_of_shares() -> None:
    """Kaplan-Meier as it is defined, one time after another, with ties."""
    time, died = lives_of(9.0, 300, seed=3)
    time = np.round(time)
    times, alive = survival.kaplan_meier(time, died)
    share = 1.0
    for at in sorted(set(time)):
        share *= 1 - sum((time == at) & died) / sum(time >= at)
        place = np.flatnonzero(times <= at)
        assert alive[place[-1]] == pytest.approx(share, abs=1e-12)


def table(**regions) -> dict[str, Lifetimes]:
    found = {}
    for number, (name, (time, died)) in enumerate(regions.items()):
        span = torch.arange(len(time)) // 20 + 1000 * number
        found[name] = Lifetimes(torch.tensor(time), torch.tensor(died), span)
    return found


def test_estimates_intervals_and_shrinking() -> None:
    lives = table(
        system=lives_of(160.0, 3000, 4), scratchpad=lives_of(15.0, 3000, 5), plan=lives_of(500.0, 50, 6)
    )
    found = survival.estimate(lives, "steps", resamples=100)
    assert found["system"].half_life / found["scratchpad"].half_life > 8
    for name, truth in (("system", 160.0), ("scratchpad", 15.0)):
        assert found[name].low < truth < found[name].high
        assert found[name].low < found[name].half_life < found[name].high
        assert not found[name].shrunk
    whole, few = found["all"].half_life, found["plan"]
    own, _ = survival.half_life(*(x.numpy() for x in (lives["plan"].time, lives["plan"].died)))
    assert few.shrunk
    assert few.half_life == pytest.approx(whole * (own / whole) ** 0.25, rel=1e-6), (
        "50 of 200 tokens: a quarter"
    )
    again = survival.estimate(lives, "steps", resamples=100)
    assert again == found, "the seed decides"


def test_lives_that_never_end() -> None:
    time = np.full(300, 7.0)
    assert survival.median(time, np.zeros(300, bool)) is None
    assert survival.half_life(time, np.zeros(300, bool)) == (math.inf, "exponential")
    found = survival.estimate(table(system=(time, np.zeros(300, bool))), "steps", resamples=10)
    assert found["system"].half_life == pytest.approx(4096.0), "clamped"
    few = np.zeros(300, bool)
    few[:3] = True
    assert survival.half_life(time, few) == (pytest.approx(math.log(2) * 2100 / 3), "exponential")
    with pytest.raises(ConfigError, match="too short"):
        survival.estimate({}, "steps")


def test_a_median_of_nothing_is_a_median() -> None:
    time, died = np.array([0.0] * 300 + [40.0] * 200), np.ones(500, bool)
    assert survival.half_life(time, died) == (0.0, "kaplan-meier")
    found = survival.estimate(table(scratchpad=(time, died)), "turns", resamples=10)["scratchpad"]
    assert found.method == "kaplan-meier"
    assert found.half_life == pytest.approx(0.5), "the least that the clock tells"


def test_the_file_is_a_region_table(tmp_path) -> None:
    found = survival.estimate(table(system=lives_of(90.0, 500, 7)), "tokens", resamples=20)
    result = survival.to_json(found, "tokens")
    assert set(result["regions"]) == {"system"}
    assert {"half_life", "low", "high", "n", "clock"} <= set(result["regions"]["system"])
    path = tmp_path / "table.json"
    path.write_text(json.dumps(result))
    assert load_regions(path)["system"] == {
        "half_life": result["regions"]["system"]["half_life"],
        "clock": "tokens",
    }


@pytest.mark.parametrize(("clock", "page"), [("tokens", 1), ("steps", 1), ("turns", 1), ("tokens", 4)])
def test_lifetimes_equal_those_of_the_stock_model(models, engines, clock, page) -> None:
    """Attention weights of the eager model, summed chunk by chunk and token by token."""
    chat = [system("Be brief and kind."), user("Where is the key? " * 4), user("And the lock? " * 4)]
    engine = chat_engine(engines)
    options = {"stride": 8, "grace": 8, "window": 8, "threshold": 1.0}
    got = trace(engine, [Message.parse(one) for one in chat], clock=clock, page=page, **options)
    ids = joint("chatml", chat)
    model = models("qwen2", vocab_size=448, layers=2, attn_implementation="eager")
    with torch.no_grad():
        weights = model(torch.tensor([ids]), use_cache=False, output_attentions=True).attentions
    mean = torch.stack([layer[0].mean(0) for layer in weights]).mean(0)
    count, sinks = len(ids), 4
    header = tokenizer("chatml").convert_tokens_to_ids("<|im_start|>")
    starts = [place for place, token in enumerate(ids) if token == header]

    def together(key, stop):
        """The tokens before `stop` that share a page with `key`: the users' messages are of one region."""
        side = key < starts[1]
        return [k for k in range(stop) if k // page == key // page and (k < starts[1]) == side]

    last = [min(8 * (token // 8) + 7, count - 1) for token in range(count)]
    for start in range(0, count, 8):
        stop = min(start + 8, count)
        shares = [
            0.0 if key < sinks else float(mean[start:stop, key].sum()) / min(stop - start, stop - key)
            for key in range(stop)
        ]
        fair = sum(shares) / (stop - sinks)
        for key in range(max(0, start - 8)):
            if max(shares[k] for k in together(key, stop)) >= fair:
                last[key] = stop - 1
    want = {"system": [], "user": []}
    for key in range(sinks, count - 16):
        turn = sum(start <= key for start in starts)
        then = sum(start <= last[key] for start in starts)
        age = {"tokens": last[key] - key, "steps": (last[key] - key) / 64, "turns": then - turn}[clock]
        want["system" if key < starts[1] else "user"].append((age, last[key] < count - 8))
    for name, lives in want.items():
        assert got[name].time.tolist() == pytest.approx([age for age, _ in lives]), name
        assert got[name].died.tolist() == [died for _, died in lives]
    both = join([got, got])
    assert len(both["user"]) == 2 * len(got["user"])


def test_steps_pass_as_in_the_session_that_wrote_the_answers(engines) -> None:
    """A life that spans an answer is as long as the clock of a session that decodes it says."""
    words = "the key is under the mat " * 6
    chat = [system("Be kind."), user("Where is it? " * 6), assistant(words), user("And now? " * 12)]
    engine = chat_engine(engines)
    live = engine.session(policy="full", positions="logical")
    live.append(chat[:2])
    before = len(live), live.memory.aging.times["steps"]
    live.force(encode("chatml", words))
    after = len(live), live.memory.aging.times["steps"]
    options = {"stride": 8, "grace": 8, "window": 8, "threshold": 0.0}  # everything is looked at to the end
    got = trace(engine, [Message.parse(one) for one in chat], **options)["system"].time
    assert after[1] - before[1] == after[0] - before[0] > 32
    message = len(joint("chatml", chat[:3])) - len(joint("chatml", chat[:2]))  # with header and closing
    others = len(joint("chatml", chat)) - message - 5
    assert got[0] == pytest.approx(message + others / 64, abs=1e-9), "from the first token behind the sinks"
    assert message - 8 <= after[1] - before[1] <= message, "the same but for header and closing"


def test_forms_of_transcripts(tmp_path) -> None:
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    forms = {
        "list.json": json.dumps(chat),
        "object.json": json.dumps({"messages": chat}, indent=1),
        "lines.jsonl": "\n".join(json.dumps({"messages": chat}) for _ in range(2)),
        "lists.jsonl": "\n\n".join(json.dumps(chat) for _ in range(2)),
        "many.json": json.dumps([chat, {"messages": chat}]),
        "session.jsonl": json.dumps({"session": {"title": "t"}}) + "\n" + "\n".join(map(json.dumps, chat)),
        "message.jsonl": json.dumps(chat[1]),
    }
    for name, text in forms.items():
        path = tmp_path / name
        path.write_text(text)
        found = transcripts.load(path)
        assert len(found) == (2 if name in ("lines.jsonl", "lists.jsonl", "many.json") else 1), name
        assert found[0][-1].content == "U"
    for text in ("", "no", "[]", '[{"role": "king"}]', '{"a": 1}', "[1]\n{"):
        path = tmp_path / "bad"
        path.write_text(text)
        with pytest.raises((SessionFileError, ConfigError)):
            transcripts.load(path)
    with pytest.raises(SessionFileError):
        transcripts.load(tmp_path / "absent")
