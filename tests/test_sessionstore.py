"""Saving and restoring: the same session, whole or not at all, whatever happens while it is written (C16, C35)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tenure import Engine, Plan, Step
from tenure.errors import ConfigError, SaveError
from tenure.files import remove_parts, replace_file
from tenure.policies import POLICIES
from tests.chats import SHAPE, assistant, chat_engine, system, tokenizer, tool, user
from tests.conftest import random_ids, tiny_model
from tests.oracles import check_ledger, state_of
from tests.planners.chats import drowned

SMALL = {"budget": 80, "chunk": 32, "slack": 4}


def parts(folder):
    """Whatever is in a folder besides saved sessions."""
    return [path for path in folder.iterdir() if not path.name.endswith(".safetensors")]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "session.safetensors"


def grown(engine, **options):
    """A session with a plan, pins, evictions and an answer whose last token waits."""
    plan = Plan([Step("read", ("facts",)), Step("fix", ("facts", "rules")), Step("end")])
    session = engine.session(plan=plan, **{**SMALL, **options})
    session.append(
        [system("Be brief.", span="rules"), user("The pump is 417. " * 4, span="facts", step="read")]
    )
    session.ask(user("Go on. " * 30, step="fix", pin="soft"), max_tokens=6)
    return session


def go_on(session):
    """What a session says next, and all of its state behind it."""
    told = [session.ask(user("And then?", step="end"), max_tokens=12)]
    told.append(session.ask([user("More " * 30), user("What now?")], max_tokens=12))
    return told, session.memory.ids.tolist(), state_of(session)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "full"])
def test_a_restored_session_is_the_same_to_the_byte_and_goes_on_alike(engines, file, policy):
    engine = chat_engine(engines)
    session = grown(engine, policy=policy)
    assert session.memory.waiting, "the last token of an answer waits"
    assert session.memory.ledger.evicted_ever
    session.save(file)
    again = engine.restore(file)
    assert again.config == session.config
    check_ledger(again)
    assert state_of(again) == state_of(session)
    assert go_on(again) == go_on(session)


def asked_again(session):
    """What a session whose planner has learnt says next."""
    session.append(tool("E417 again, QUEUE_DEPTH too", span="late"))
    return [session.ask(user(text), max_tokens=3) for text in ("E417, FeeRule?", "QUEUE_DEPTH?")]


@pytest.mark.parametrize("planner", ["online", "retrieval"])
def test_planners_go_on_with_what_they_have_learnt(engines, file, planner):
    session = drowned(engines, planner=planner)
    session.ask(user("What says MAX_SHARDS of FeeRule?"), max_tokens=3)
    session.ask(user("And E417, and MAX_SHARDS?"), max_tokens=3)
    session.save(file)
    again = session.engine.restore(file)
    assert asked_again(again) == asked_again(session)
    assert state_of(again) == state_of(session)
    learnt = [one.planning.planners[0] for one in (session, again)]
    assert vars(learnt[0]).keys() == vars(learnt[1]).keys()
    assert str(session.stats().planner) == str(again.stats().planner)
    if planner == "online":
        assert vars(learnt[0]) == vars(learnt[1])


@pytest.mark.parametrize("planner", ["explicit", "online", "retrieval"])
@pytest.mark.parametrize("left", ["nothing", "some", "others"])
def test_planners_of_a_session_that_went_back(engines, file, planner, left):
    """They hear of it at the next boundary, before or behind a restart."""
    session = drowned(engines, planner=planner)
    session.ask(user("What says MAX_SHARDS of FeeRule?", span="q"), max_tokens=3)
    table = session.memory.ledger.spans
    session.keep_first(0 if left == "nothing" else table.get("filler-3").start + 4)
    if left == "others":
        session.append_ids(random_ids(40), span="q")
    session.save(file)
    again = session.engine.restore(file)
    assert asked_again(again) == asked_again(session)
    assert state_of(again) == state_of(session)
    assert again.planning.came == session.planning.came


@pytest.mark.parametrize("positions", ["logical", "compact", "bounded"])
@pytest.mark.parametrize("rotate", ["copy", "read"])
def test_every_position_map_and_both_forms_of_keys(engines, file, positions, rotate):
    engine = engines("qwen2", tokenizer=tokenizer("chatml"), rotate=rotate, **SHAPE)
    session = grown(engine, policy="h2o", positions=positions)
    session.save(file)
    again = engine.restore(file)
    assert state_of(again) == state_of(session)
    assert go_on(again) == go_on(session)


def test_a_session_without_a_budget_longer_than_its_first_slab(engines, file):
    session = engines("llama").session(policy="full", positions="logical")
    session.append_ids(random_ids(4200), span="all")
    session.save(file)
    again = engines("llama").restore(file)
    assert state_of(again) == state_of(session)
    more = random_ids(8, seed=1)
    assert torch.equal(again.feed(more), session.feed(more))


def test_rollback_and_forks_of_a_restored_session(engines, file):
    engine = chat_engine(engines)
    session = grown(engine)
    places = [length for length, _ in session._states]
    session.save(file)
    again = engine.restore(file)
    for length in sorted({*places[:-1], len(session) - 3}, reverse=True):
        if length <= len(session):
            for one in (session, again):
                one.keep_first(length)
            assert state_of(again) == state_of(session)
    assert go_on(again.fork()) == go_on(session.fork())


def test_taking_a_turn_back_is_the_same_behind_an_answer_that_was_saved(engines, file):
    """Clocks and scores go back to where the answer ended, which nobody knew yet when it was saved."""
    session = grown(chat_engine(engines), policy="h2o")
    session.save(file)
    again = session.engine.restore(file)
    length = len(session)
    for one in (session, again):
        one.append(user("More of it. " * 2))
        one.keep_first(length)
    assert again.memory.aging.times == session.memory.aging.times
    assert state_of(again) == state_of(session)


def test_tokens_that_were_queued_and_not_computed_are_saved(engines, file):
    engine = chat_engine(engines)
    session = engine.session(**SMALL)
    session.append(user("First. " * 8))
    session.queue([user("Second " * 3, span="second", pin="hard"), assistant("Third")], reply=True)
    engine.step([session])  # part of it
    assert session.memory.waiting
    session.save(file)
    again = engine.restore(file)
    assert state_of(again) == state_of(session)
    for one in (session, again):
        engine.drain([one])
    assert state_of(again) == state_of(session)


def test_what_the_policy_has_written_is_known_before_any_moment_is_remembered(engines, file):
    engine = chat_engine(engines)
    session = engine.session(policy="h2o", **SMALL)
    session.queue([user("Second " * 30)])
    engine.step([session])  # part of it
    assert not session.memory.past.moments
    session.save(file)
    again = engine.restore(file)
    assert again.memory.past.written == session.memory.past.written == ["score"]


def test_an_empty_session_and_one_of_raw_ids(engines, file):
    for session in (engines("llama").session(**SMALL), chat_engine(engines).session(**SMALL)):
        session.save(file)
        again = session.engine.restore(file)
        assert state_of(again) == state_of(session)
        again.append_ids([11, 12])


def test_nul_and_odd_characters(engines, file):
    """C35: nothing is lost behind a NUL."""
    engine = chat_engine(engines)
    session = engine.session(budget=400, chunk=64)
    session.append([user("Read it."), tool("\0\0binary\0more" * 3 + "\0 codeword 😀 ✓", span="bin ✓")])
    session.save(file)
    again = engine.restore(file)
    assert state_of(again) == state_of(session)
    assert "codeword" in engine.tokenizer.decode(again.memory.ids.tolist())
    assert again.explain("bin ✓") == session.explain("bin ✓")


# -- what is refused ---------------------------------------------------------------------------------


def test_an_open_turn_is_refused(engines, file):
    session = grown(chat_engine(engines))
    turn = session.start_turn(max_tokens=4)
    with pytest.raises(ConfigError, match="turn"):
        session.save(file)
    turn.close()
    session.save(file)


def test_another_model_tokenizer_or_dtype_is_refused_by_name(engines, file):
    engine = chat_engine(engines)
    grown(engine).save(file)

    def other(seed=0, template="chatml", dtype=torch.float32, **options):
        shape = {**SHAPE, **options}
        return Engine(tiny_model("qwen2", seed=seed, **shape).to(dtype), tokenizer(template))

    other().restore(file)  # equal weights, loaded again
    with pytest.raises(ConfigError, match="another weights\\."):
        other(seed=1).restore(file)
    with pytest.raises(ConfigError, match="another tokenizer\\."):
        other(template="strict").restore(file)
    with pytest.raises(ConfigError, match="bfloat16"):
        other(dtype=torch.bfloat16).restore(file)
    with pytest.raises(ConfigError, match="shape"):
        other(layers=3).restore(file)
    with pytest.raises(ConfigError, match="weights"):
        other(rope_parameters={"rope_type": "default", "rope_theta": 500.0}).restore(file)


def test_a_changed_byte_anywhere_is_refused(engines, file):
    engine = chat_engine(engines)
    session = grown(engine)
    session.save(file)
    whole = file.read_bytes()
    want = state_of(session)
    for place in [0, 9, 100, *random.Random(0).sample(range(len(whole)), 60), len(whole) - 1]:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x11]) + whole[place + 1 :])
        try:
            again = engine.restore(file)
        except (SaveError, ConfigError):
            continue
        assert state_of(again) == want, place  # a byte that means nothing, padding of the header
    for length in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(SaveError):
            engine.restore(file)


def test_files_that_are_no_session(engines, file):
    from safetensors.torch import save_file

    engine = chat_engine(engines)
    with pytest.raises(SaveError, match="no such file"):
        engine.restore(file)
    save_file({"a": torch.zeros(2)}, file)
    with pytest.raises(SaveError, match="no session"):
        engine.restore(file)
    save_file({"a": torch.zeros(2)}, file, metadata={"kind": "tenure session", "format": "99"})
    with pytest.raises(SaveError, match="99"):
        engine.restore(file)


# -- crashes -----------------------------------------------------------------------------------------

CHILD = """
import json, resource, sys
from tests.test_sessionstore import go_on, plain
from tests.chats import SHAPE, tokenizer
from tests.conftest import tiny_model
from tenure import Engine
from tenure.errors import SaveError

engine = Engine(tiny_model("qwen2", **SHAPE), tokenizer("chatml"))
told, ids, _ = go_on(engine.restore(sys.argv[1]))
print(json.dumps([told, ids]), flush=True)

# From here on the kernel refuses to make any file larger than 40 KB, as a full disk does.
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
session = plain(engine, 300)
try:
    session.save(sys.argv[2])
    print("saved")
except SaveError as error:
    print(error)
session.append_ids([30, 31])
print(len(session), flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

sessions = plain(engine, 100), plain(engine, 300)
while True:
    for session in sessions:
        session.save(sys.argv[2])
"""


def plain(engine, length):
    """A session of so many raw ids."""
    session = engine.session(policy="full", positions="logical")
    session.append_ids(random_ids(length, seed=length), span="all")
    return session


def test_another_process_a_full_disk_and_a_kill(engines, tmp_path):
    """One process in turn: goes on from a file, cannot write, and is killed while it saves over older versions."""
    engine = chat_engine(engines)
    session = grown(engine)
    session.save(tmp_path / "grown.safetensors")
    file = tmp_path / "store" / "session.safetensors"
    plain(engine, 100).save(file)
    old = file.read_bytes()
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, tmp_path / "grown.safetensors", file],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        told, ids, _ = go_on(session)
        assert json.loads(process.stdout.readline()) == [told, ids]
        assert "could not be written" in process.stdout.readline()
        assert file.read_bytes() == old
        assert not parts(file.parent)
        assert process.stdout.readline() == "302\n", "the session lives on"
        _kill_at_random(process, engine, file)
    finally:
        process.kill()
        process.communicate()


def _kill_at_random(process, engine, file):
    """C16. Stopping shows the files that a kill would leave, so one process serves for many moments."""
    draw = random.Random(0)
    want = {length: state_of(plain(engine, length)) for length in (100, 300)}
    seen = set()
    for _ in range(25):
        time.sleep(draw.random() * 0.03)
        os.kill(process.pid, signal.SIGSTOP)
        again = engine.restore(file)
        state = state_of(again)
        assert state["ids"] == want[len(again)]["ids"]
        assert state == want[len(again)], "old or new, never a mix"
        seen.add(len(again))
        os.kill(process.pid, signal.SIGCONT)
    assert seen == {100, 300}
    while True:  # until it is stopped in the middle of a write
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        if parts(file.parent):
            break
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(draw.random() * 0.01)
    process.kill()
    process.wait()
    assert parts(file.parent), "what it was writing is left"
    assert len(engine.restore(file)) in want
    assert not parts(file.parent), "nothing is left of what was not finished"


def test_a_write_that_fails_at_any_point(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")

    def fail(part):
        part.write_text("half")
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        replace_file(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    replace_file(path, lambda part: part.write_text("new"))
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_at_work_is_not_taken_for_one_left_behind(tmp_path):
    path = tmp_path / "a"

    def write(part):
        assert remove_parts(tmp_path) == 0
        part.write_text("new")

    replace_file(path, write)
    assert path.read_text() == "new"
    (tmp_path / ".x.tenure-part").mkdir()
    assert remove_parts(tmp_path) == 1


def test_a_folder_that_cannot_be_written(engines, tmp_path):
    session = grown(chat_engine(engines))
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="could not be written"):
        session.save(tmp_path / "file" / "session")
    assert Path(tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("path", ["a\0b", "\ud800", None, 5])
def test_what_cannot_be_a_path_is_refused_by_name(engines, path):
    engine = engines("qwen2")
    session = engine.session(budget=64, chunk=32)
    session.append_ids([20, 21, 22])
    with pytest.raises(ConfigError, match="path: "):
        session.save(path)
    with pytest.raises(ConfigError, match="path: "):
        engine.restore(path)
    assert session.feed([23]).isfinite().all()
