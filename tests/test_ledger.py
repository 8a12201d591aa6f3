"""The ledger against a list of slots, and sessions against O3 after every call."""

from __future__ import annotations

import copy
import random
from collections import Counter
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tenure import Engine, Plan
from tenure.errors import BudgetError, ConfigError, IntegrityError, UnknownSpanError
from tenure.ledger import Ledger
from tenure.policies import POLICIES
from tenure.regions import Region
from tenure.spans import Span, SpanTable
from tests.conftest import random_ids, tiny_model
from tests.oracles import check_ledger, state_of

CPU = torch.device("cpu")
QUICK = settings(
    max_examples=100, stateful_step_count=14, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class Naive:
    """A ledger beside lists: each slot is ``[logical, position, score]``, each span has what was lost of it."""

    def __init__(self, groups):
        self.ledger = Ledger(groups, 8, CPU)
        self.slots = [[] for _ in range(groups)]
        self.spans = []  # [id, start, stop, Counter]
        self.length = self.next = self.named = 0

    def append(self, draw):
        count, fresh, pin = draw.randint(1, 9), draw.random() < 0.7, draw.choice([None, None, None, "hard"])
        while len(self.slots[0]) + count > self.ledger.capacity:
            self.ledger.grow(2 * self.ledger.capacity)
        if fresh or not self.spans:
            self.named += 1
            span = Span(f"s{self.named}", self.length, self.length, Region.OTHER, pin=pin)
            self.ledger.spans.add(span)
            self.spans.append([span.id, self.length, self.length, Counter()])
        self.ledger.spans[len(self.spans) - 1].stop += count
        self.spans[-1][2] += count
        self.ledger.stage(count)
        self.ledger.commit(count)
        for slots in self.slots:
            slots += [[self.length + i, self.next + i, 0.0] for i in range(count)]
        self.length += count
        self.next += count

    def score(self, draw):
        for group, slots in enumerate(self.slots):
            for row, slot in enumerate(slots):
                slot[2] = float(draw.randint(0, 5))
                self.ledger.score[group, row] = slot[2]

    def evict(self, draw):
        rows, reason = len(self.slots[0]), draw.choice(["budget", "plan"])
        kept = draw.randint(0, rows)
        hard = {span.id for span in self.ledger.spans if span.pin == "hard"}
        index = []
        for slots in self.slots:
            pinned = [r for r, slot in enumerate(slots) if self.span_of(slot[0])[0] in hard]
            if len(pinned) > kept:
                return
            rest = [r for r in range(rows) if r not in pinned]
            chosen = draw.sample(rest, kept - len(pinned))
            index.append(sorted(pinned + chosen))
        self.ledger.keep(torch.tensor(index, dtype=torch.int64).view(len(index), kept), reason)
        for group, rows_kept in enumerate(index):
            for row, slot in enumerate(self.slots[group]):
                if row not in rows_kept:
                    self.span_of(slot[0])[3][reason] += 1
            self.slots[group] = [self.slots[group][row] for row in rows_kept]

    def splice(self, draw):
        """A span comes back whole: into its gap where all layers still have one, else everybody is renumbered."""
        if not self.spans:
            return
        number = draw.randrange(len(self.spans))
        _, start, stop, _ = self.spans[number]
        span, hard = self.ledger.spans[number], {s.id for s in self.ledger.spans if s.pin == "hard"}
        others = [[r for r, slot in enumerate(slots) if not start <= slot[0] < stop] for slots in self.slots]
        pinned = [
            [r for r in rows if self.span_of(slots[r][0])[0] in hard]
            for rows, slots in zip(others, self.slots, strict=True)
        ]
        least, most = max(map(len, pinned)), min(map(len, others))
        if least > most:
            return
        kept = draw.randint(least, most)
        index = []
        for rows, fixed in zip(others, pinned, strict=True):
            loose = [row for row in rows if row not in fixed]
            index.append(sorted(fixed + draw.sample(loose, kept - len(fixed))))
        while kept + stop - start > self.ledger.capacity:
            self.ledger.grow(2 * self.ledger.capacity)
        score = torch.arange(stop - start).float() + torch.arange(len(index))[:, None]
        count, times, numbered = stop - start, span.restored, self.ledger.renumbers
        order = self.ledger.splice(span, torch.tensor(index, dtype=torch.int64).view(len(index), kept), score)
        fits = kept > 0
        for group, (slots, rows, stays) in enumerate(zip(self.slots, others, index, strict=True)):
            for row in set(rows) - set(stays):
                self.span_of(slots[row][0])[3]["room"] += 1
            left = [slots[row] for row in stays]
            fits &= max((s[1] for s in left if s[0] < start), default=-1) + count < min(
                (s[1] for s in left if s[0] >= stop), default=self.next
            )
            came = [[start + i, None, float(score[group, i])] for i in range(count)]
            self.slots[group] = [[*left, *came][place] for place in order[group].tolist()]
        self.spans[number][3].clear()
        assert span.restored == times + 1
        assert self.ledger.renumbers == numbered + (not fits), "only where there is no gap"
        if not fits:
            self.next = kept + count
        usual = start - (self.length - self.next)  # where it stood, if nothing was renumbered since
        free = fits
        for slots in self.slots if fits else ():
            free &= max((s[1] for s in slots if s[0] < start), default=-1) < usual
            free &= usual + count <= min((s[1] for s in slots if s[0] >= stop), default=self.next)
        for slots in self.slots:
            behind = min((s[1] for s in slots if s[0] >= stop), default=self.next) if fits else 0
            for row, slot in enumerate(slots):
                if not fits:
                    slot[1] = row
                elif slot[1] is None:
                    slot[1] = (usual if free else behind - count) + slot[0] - start

    def renumber(self, draw):
        self.ledger.renumber()
        for slots in self.slots:
            for row, slot in enumerate(slots):
                slot[1] = row
        self.next = len(self.slots[0])

    def rollback(self, draw):
        length = draw.randint(self.length // 2, self.length)
        index = self.ledger.truncate(length).tolist()
        stays = [[slot for slot in slots if slot[0] < length] for slots in self.slots]
        kept = min(map(len, stays))
        hard = {span.id for span in self.ledger.spans if span.pin == "hard"}
        for group, slots in enumerate(stays):
            # The best scores stay, of equal ones the earliest; hard pins before all.
            order = sorted(slots, key=lambda slot: (self.span_of(slot[0])[0] not in hard, -slot[2], slot[0]))
            chosen = sorted(order[:kept])
            assert [self.slots[group][row][0] for row in index[group]] == [slot[0] for slot in chosen]
            self.slots[group] = chosen
        behind = max((slots[-1][1] + 1 for slots in self.slots if slots), default=0)
        self.next = max(behind, self.next - (self.length - length))
        self.length = length
        self.spans = [[i, a, min(b, length), lost] for i, a, b, lost in self.spans if a < length]
        for i, a, b, _ in self.spans:  # what was lost is told by what is missing
            here = sum(a <= slot[0] < b for slots in self.slots for slot in slots)
            assert self.ledger.spans.get(i).evicted.total() == (b - a) * len(self.slots) - here
            self.span_of(a)[3] = Counter(self.ledger.spans.get(i).evicted)

    def go_on_with_a_clone(self, draw):
        old = self.ledger
        self.ledger = old.clone()
        old.logical.fill_(-7)  # an independent copy does not see this
        old.position.fill_(-7)
        old.score.fill_(-7.0)
        for span in old.spans:
            span.stop = -1
            span.evicted["poison"] += 1

    def span_of(self, logical):
        return next(span for span in self.spans if span[1] <= logical < span[2])

    def agrees(self):
        ledger, rows = self.ledger, len(self.slots[0])
        assert (ledger.rows, ledger.length, ledger.next_position) == (rows, self.length, self.next)
        assert ledger.evictions == self.length - rows
        assert {array.shape for array in ledger.arrays.values()} == {(len(self.slots), ledger.capacity)}
        for column, array in enumerate((ledger.logical, ledger.position, ledger.score)):
            assert array[:, :rows].tolist() == [[slot[column] for slot in slots] for slots in self.slots]
        assert [[s.id, s.start, s.stop, s.evicted] for s in ledger.spans] == self.spans
        assert ledger.gaps == (self.next != rows)
        ledger.check_integrity(rows, self.length, None)
        for span in ledger.spans:
            inside = [[span.start <= slot[0] < span.stop for slot in slots] for slots in self.slots]
            assert ledger.inside(span).tolist() == inside
            share = sum(map(sum, inside)) / (len(span) * len(self.slots))
            assert ledger.resident(span) == pytest.approx(share)
            gaps = [self.next - s[1] for slots in self.slots for s in slots if span.start <= s[0] < span.stop]
            want = sum(gaps) / len(gaps) if gaps else None
            assert ledger.rotary_gap(span) == pytest.approx(want)


@pytest.mark.parametrize("seed", range(40))
def test_the_ledger_is_what_lists_say(seed):
    draw = random.Random(seed)
    naive = Naive(groups=draw.choice([1, 3]))
    acts = [naive.append, naive.append, naive.score, naive.evict, naive.splice, naive.splice]
    acts += [naive.renumber, naive.rollback, naive.go_on_with_a_clone]
    for _ in range(40):
        draw.choice(acts)(draw)
        naive.agrees()


@cache
def engine() -> Engine:
    return Engine(tiny_model("llama", layers=2, hidden_size=32, intermediate_size=32))


class SessionMachine(RuleBasedStateMachine):
    """Random appends, evictions, decoding, rollbacks and forks on a real (tiny) model."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        positions=st.sampled_from(["bounded", "logical", "compact"]),
        granularity=st.sampled_from([None, "session", "layer"]),
        budget=st.integers(6, 24),
        chunk=st.integers(1, 16),
        slack=st.integers(1, 6),
        sinks=st.integers(0, 4),
    )
    def start(self, policy, positions, granularity, budget, chunk, slack, sinks):
        self.session = engine().session(
            policy=policy,
            budget=None if policy == "full" else budget,
            positions=positions,
            granularity=granularity,
            chunk=chunk,
            slack=slack,
            sinks=sinks,
            limit=budget + chunk + slack if positions == "bounded" else None,
        )
        self.ids = []
        self.others = []  # forks that nobody touches, with their state
        self.seed = 0

    def fresh(self, count):
        self.seed += 1
        return random_ids(count, seed=self.seed)

    @rule(count=st.integers(0, 40), pin=st.sampled_from([None, None, "soft", "hard"]))
    def append(self, count, pin):
        ids = self.fresh(count)
        before = state_of(self.session)
        try:
            span = self.session.append_ids(ids, pin=pin)
        except BudgetError:
            assert pin == "hard"
            assert state_of(self.session) == before
            return
        self.ids += ids
        if ids:
            assert self.session.explain(span.id).tokens == count
            budget = self.session.config.budget
            assert budget is None or self.session.stats().resident <= budget

    @rule(count=st.integers(1, 12))
    def decode(self, count):
        ids = self.fresh(count)
        self.session.force(ids)
        self.ids += ids
        config = self.session.config
        assert config.budget is None or self.session.stats().resident <= config.budget + config.slack

    @rule(data=st.data())
    def keep_first(self, data):
        count = data.draw(st.integers(-2, len(self.ids) + 2))
        before = state_of(self.session)
        if 0 <= count <= len(self.ids):
            self.session.keep_first(count)
            del self.ids[count:]
        else:
            with pytest.raises(ConfigError):
                self.session.keep_first(count)
            assert state_of(self.session) == before

    @rule(data=st.data())
    def drop_last(self, data):
        count = data.draw(st.integers(0, len(self.ids) + 2))
        before = state_of(self.session)
        if count <= len(self.ids):
            self.session.drop_last(count)
            del self.ids[len(self.ids) - count :]
        else:
            with pytest.raises(ConfigError):
                self.session.drop_last(count)
            assert state_of(self.session) == before
        if count == 0:
            assert state_of(self.session) == before

    @precondition(lambda self: len(self.others) < 3)
    @rule(follow=st.booleans())
    def fork(self, follow):
        twin = self.session.fork()
        assert state_of(twin) == state_of(self.session)
        if follow:
            self.session, twin = twin, self.session
        self.others.append((twin, state_of(twin)))

    @invariant()
    def holds(self):
        if not hasattr(self, "session"):
            return
        assert self.session.memory.ids.tolist() == self.ids
        assert self.session.memory.waiting == 0
        check_ledger(self.session)
        for other, state in self.others:
            assert state_of(other) == state

    def teardown(self):
        if not hasattr(self, "session"):
            return
        # Still alive: the next tokens give numbers, and the ids are what was read.
        logits = self.session.feed(self.fresh(3))
        assert logits.isfinite().all()
        check_ledger(self.session)


TestSession = SessionMachine.TestCase
TestSession.settings = QUICK


# -- single facts ------------------------------------------------------------------------------------


def filled(groups=1, count=10):
    ledger = Ledger(groups, 32, CPU)
    ledger.spans.add(Span("a", 0, 4, Region.SYSTEM))
    ledger.spans.add(Span("b", 4, count, Region.USER))
    ledger.stage(count)
    ledger.commit(count)
    return ledger


def test_reasons_are_counted_for_their_spans():
    ledger = filled()
    ledger.keep(torch.tensor([[0, 1, 2, 8, 9]]), {1: "plan"})
    ledger.keep(torch.tensor([[0, 4]]), "expired")
    assert dict(ledger.spans.get("a").evicted) == {"budget": 1, "expired": 2}
    assert dict(ledger.spans.get("b").evicted) == {"plan": 4, "expired": 1}
    assert ledger.evicted_ever == 8


def test_a_rollback_forgets_the_losses_of_what_it_takes_back():
    ledger = filled()
    ledger.keep(torch.tensor([[0, 1, 2, 3, 4, 5]]), "budget")  # 6..9 of b are gone
    ledger.truncate(7)
    assert dict(ledger.spans.get("b").evicted) == {"budget": 1}
    ledger.truncate(6)
    assert dict(ledger.spans.get("b").evicted) == {}
    assert ledger.evicted_ever == 4, "a rollback does not lower it"


@pytest.mark.parametrize("sinks", [0, 2])
def test_a_rollback_of_unequal_layers_spares_sinks_and_hard_pins(sinks):
    ledger = filled(groups=2)
    ledger.spans.pin(ledger.spans.get("b"), "hard")
    ledger.score[:, :10] = torch.arange(10.0)
    ledger.score[:, 4:] = 0.0  # pins that nobody looks at
    ledger.keep(torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 4, 5, 6, 7, 8, 9]]), "budget")
    index = ledger.truncate(8, sinks)
    logical = ledger.logical[:, : ledger.rows].tolist()
    assert ledger.rows == 6
    assert logical[1] == [0, 1, 4, 5, 6, 7]
    assert logical[0] == ([0, 1, 4, 5, 6, 7] if sinks else [2, 3, 4, 5, 6, 7])
    assert ledger.spans.get("a").evicted["rollback"] == 2
    assert index.shape == (2, 6)


def test_compressed_stretches_have_places_between_the_rows():
    ledger = filled(groups=2, count=30)
    ledger.keep(torch.tensor([[0, 1, 2, 5, 11, 20, 24, 29], [0, 3, 4, 6, 7, 12, 19, 28]]), "compressed")
    ledger.blocks = ((3, 11, 2), (13, 28, 5))
    assert ledger.gaps
    ledger.renumber()
    for logical, position in zip(ledger.logical.tolist(), ledger.position.tolist(), strict=True):
        for row, token in enumerate(logical[:8]):
            before = [(token - start) * width // (stop - start) for start, stop, width in ledger.blocks]
            want = row + min(2, max(0, before[0])) + min(5, max(0, before[1]))
            assert position[row] == want
    assert ledger.next_position == 8 + 2 + 5
    assert not ledger.gaps
    ledger.check_integrity(8, 30, 15)


@pytest.mark.parametrize("length", [0, 3, 8, 10])
def test_logical_positions_stay_logical_after_a_rollback(length):
    ledger = filled()
    ledger.keep(torch.tensor([[0, 1, 9]]), "budget")
    ledger.truncate(length)
    assert ledger.next_position == length
    ledger.stage(2)
    ledger.commit(2)
    assert torch.equal(ledger.position[:, : ledger.rows], ledger.logical[:, : ledger.rows])


def test_spans_without_tokens_have_lost_nothing():
    assert Ledger(1, 4, CPU).span_sizes().tolist() == [0]
    ledger = filled()
    assert ledger.span_sizes().tolist() == [4, 6]
    assert ledger.resident(Span("coming", 10, 10, Region.OTHER)) == 1.0


def break_rows(ledger):
    ledger.rows -= 1


def break_order(ledger):
    ledger.logical[0, 2:4] = torch.tensor([3, 2])


def break_positions(ledger):
    ledger.position[0, 3] = ledger.position[0, 2]


def break_spans(ledger):
    ledger.spans.get("a").stop = 3


def break_future(ledger):
    ledger.logical[0, 9] = 10


def break_next(ledger):
    ledger.next_position = 9


@pytest.mark.parametrize(
    "damage", [break_rows, break_order, break_positions, break_spans, break_future, break_next]
)
def test_damage_is_found(damage):
    ledger = filled()
    ledger.check_integrity(10, 10, 10)
    broken = copy.deepcopy(ledger)
    damage(broken)
    with pytest.raises(IntegrityError):
        broken.check_integrity(10, 10, 10)


@pytest.mark.parametrize("facts", [(9, 10, None), (10, 11, None), (10, 10, 9)])
def test_disagreement_with_cache_ids_or_limit_is_found(facts):
    with pytest.raises(IntegrityError):
        filled().check_integrity(*facts)


def test_unknown_spans_are_named_with_the_known_ones():
    with pytest.raises(UnknownSpanError, match=r"no span 'z'.*Latest spans: a, b"):
        filled().spans.get("z")


def test_a_span_id_is_given_once():
    from tenure.errors import MessageError

    ledger = filled()
    for name in ("a", "", "x\0y"):
        with pytest.raises(MessageError):
            ledger.spans.add(Span(name, 10, 10, Region.OTHER))
    assert [span.id for span in ledger.spans] == ["a", "b"]
    ledger.spans.truncate(4)
    ledger.spans.add(Span("b", 4, 5, Region.OTHER))  # free again once taken back


def test_pinned_spans_are_known_without_a_look_at_all():
    table = SpanTable()
    for number, pin in enumerate((None, "hard", None, "soft", "hard")):
        table.add(Span(f"s{number}", 10 * number, 10 * number + 10, Region.USER, pin=pin))

    def pinned(of):
        return [(span.id, span.pin) for span in of.pinned]

    table.pin(table.get("s2"), "soft")
    table.pin(table.get("s1"), "soft")
    table.pin(table.get("s3"), None)
    table.pin(Span("waiting", 50, 50, Region.USER), "hard")
    assert pinned(table) == [("s1", "soft"), ("s2", "soft"), ("s4", "hard")]
    copy = table.clone()
    copy.pin(copy.get("s4"), None)
    copy.pin(copy.get("s0"), "hard")
    assert pinned(copy) == [("s0", "hard"), ("s1", "soft"), ("s2", "soft")]
    table.truncate(25)
    assert pinned(table) == [("s1", "soft"), ("s2", "soft")]
    assert pinned(copy)[-1] == ("s2", "soft")


@pytest.mark.parametrize("policy", ["h2o", "auto"])
def test_an_eviction_looks_at_resident_spans_only(engines, policy, monkeypatch):
    session = engines("qwen2").session(budget=64, chunk=16, slack=4, policy=policy)
    for number in range(120):
        session.append_ids(random_ids(8, number))
    asked = []
    monkeypatch.setattr(Plan, "loss_reason", lambda self, span: asked.append(span))
    session.append_ids(random_ids(16))
    assert 0 < len(asked) <= 64 + 16 + 4
    sizes = session.memory.ledger.span_sizes().tolist()
    assert sizes == [len(span) for span in session.memory.ledger.spans]
