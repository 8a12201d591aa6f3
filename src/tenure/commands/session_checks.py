"""What ``tenure doctor`` checks of sessions: turns, the tokenizer, and life far past the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tenure.commands.checks import Check
from tenure.commands.doctor_text import CODE, TURNS
from tenure.errors import IntegrityError

MEMORY = 0.05
"""Largest share by which the peak may miss what was said."""

_LIBRARIES = 40e6
"""Bytes of code that libraries bring in on first use; a larger share than that only of models below a gigabyte."""

if TYPE_CHECKING:
    from tenure.engine import Engine
    from tenure.session import Session


def reuse(engine: Engine) -> Check:
    """A second turn computes its own tokens only, on the ids that the template would write."""
    tokenizer = engine.tokenizer
    if not tokenizer.chat_template:
        return Check("second turn", True, None, None, "skipped: the model has no chat template")
    questions = [question for question, _ in TURNS[:2]]
    with engine.session(policy="full", positions="logical") as session:
        session.queue(questions[0], reply=True)
        computed = _drain(engine, session)
        prompt = len(session)
        turn = session.start_turn(max_tokens=24)
        while not turn.done:
            computed += engine.step([session])
        turn.close()
        session.queue(questions[1], reply=True)
        computed += _drain(engine, session)
        ids = session.memory.ids.tolist()
    told = [questions[0], turn.text, questions[1]]
    chat = [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant", "user"), told, strict=True)
    ]
    want = _render(tokenizer, chat)
    behind = len(ids) - prompt - len(turn.ids)
    rest = want[len(want) - behind :]
    differ = sum(a != b for a, b in zip(ids[:prompt] + ids[-behind:], want[:prompt] + rest, strict=True))
    middle = tokenizer.decode(want[prompt : len(want) - behind]).strip()
    # The answer itself may be written with other ids, or without its reasoning; nothing may come behind it.
    differ += not turn.text.strip().endswith(middle)
    extra = computed - len(ids)
    note = "" if ids == want or differ else " (the template or the tokenizer rewrites the answer itself)"
    return Check(
        "second turn",
        extra == 0 and differ == 0,
        float(differ + max(0, extra)),
        0.0,
        f"{computed} tokens computed for {len(ids)} of two turns; ids equal the template's rendering in all "
        f"but {differ} places{note}",
    )


def _drain(engine: Engine, session: Session) -> int:
    total = 0
    while count := engine.step([session]):
        total += count
    return total


def _render(tokenizer: Any, chat: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    written = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    ids: list[int] = tokenizer(text, add_special_tokens=not written)["input_ids"]
    return ids


def markers(engine: Engine) -> Check:
    """One start-of-text id at most, every marker one id, and the end of a turn stops an answer."""
    tokenizer = engine.tokenizer
    if not tokenizer.chat_template:
        return Check("tokenizer", True, None, None, "skipped: the model has no chat template")
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    special = {
        token.content: place for place, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    used = sorted(marker for marker in special if marker in text)
    split = [
        marker
        for marker in used
        if tokenizer(marker, add_special_tokens=False)["input_ids"] != [special[marker]]
    ]
    with engine.session(policy="full", positions="logical") as session:
        session.append([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}])
        session.append([{"role": "user", "content": "Again, " + " ".join(used)}])
        ids = session.memory.ids.tolist()
        stops = session.stop_ids
    bos = tokenizer.bos_token_id
    again = tokenizer.apply_chat_template([*chat, {"role": "user", "content": "Again, "}], tokenize=False)
    allowed = max(1, again.count(tokenizer.bos_token)) if tokenizer.bos_token else 0
    starts = ids.count(bos) if bos is not None else 0
    foreign = sum(max(0, ids.count(special[m]) - max(again.count(m), m == tokenizer.bos_token)) for m in used)
    after = tokenizer(text.rsplit("Good day", 1)[1], add_special_tokens=False)["input_ids"]
    end = next((token for token in after if token in special.values()), None)
    faults = {
        f"{starts} start-of-text ids where {allowed} may be": starts > allowed,
        f"markers in pieces: {', '.join(split)}": bool(split),
        f"{foreign} markers of a message's text read as markers": foreign > 0,
        "the end of a turn does not stop an answer": end is not None and end not in stops,
        "the template ends a turn with no marker": end is None and not stops,
    }
    found = [fault for fault, holds in faults.items() if holds]
    good = (
        f"{starts} start-of-text ids ({allowed} may be), markers {' '.join(used)} are one id each, "
        f"stops at {' '.join(tokenizer.convert_ids_to_tokens(sorted(stops)))}"
    )
    return Check("tokenizer", not found, float(len(found)), 0.0, "; ".join(found) or good)


def eviction(engine: Engine) -> Check:
    """A session far past its budget: memory stays, and cache, ledger and ids agree."""
    ids = engine.tokenizer(CODE)["input_ids"][:900]
    session = engine.session(policy="h2o", positions="bounded", budget=128, chunk=96, slack=16)
    sizes, finite = {session.memory.rows.nbytes}, True
    problem = ""
    try:
        for start in range(0, len(ids), 96):
            finite &= bool(session.feed(ids[start : start + 96])[-1].isfinite().all())
            session.check_integrity()
            sizes.add(session.memory.rows.nbytes)
        for _ in range(40):
            finite &= bool(session.feed([int(session.logits.argmax())]).isfinite().all())  # type: ignore[union-attr]
            session.check_integrity()
            sizes.add(session.memory.rows.nbytes)
    except IntegrityError as error:
        problem = f"; {error}"
    stats = session.stats()
    grown = float(max(sizes) - min(sizes))
    fits = stats.resident <= 128 + 16
    return Check(
        "eviction",
        grown == 0 and finite and fits and not problem,
        grown,
        0.0,
        f"bytes by which the cache of {stats.kv_bytes:,} grew over {stats.tokens} tokens, budget 128; "
        f"{stats.evicted} evicted, {stats.renumbers} renumberings, "
        f"{'finite' if finite else 'NOT FINITE'}{problem}",
    )


def memory(model: str, dtype: str, weights: str = "auto") -> Check:
    """The peak of a session, said before it runs and measured in a process of its own.

    With int8 weights less than was said is no error: what rounding has freed counts for the process, and is used again.
    """
    from tenure.commands.peak import PeakError, in_own_process

    try:
        found = in_own_process(model, dtype, weights)
    except PeakError as failure:
        return Check("memory", False, None, None, f"not measured: {failure}")
    parts = ", ".join(
        f"{name} {found[name] / 1e6:,.0f}" for name in ("base", "weights", "slab", "activations")
    )
    said = f"{found['stated'] / 1e6:,.0f} MB said before the run ({parts})"
    if not found["peak"]:
        return Check("memory", True, None, None, f"{said}; this system does not tell a process its peak")
    error = found["peak"] / found["stated"] - 1
    error = max(0.0, error) if weights == "int8" else abs(error)
    limit = max(MEMORY, _LIBRARIES / found["stated"])
    return Check("memory", error <= limit, error, limit, f"{said}, {found['peak'] / 1e6:,.0f} MB at the peak")
