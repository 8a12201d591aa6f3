"""LLM: the session's model under a grammar, and another one behind a real HTTP endpoint."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tenure import Plan, Step
from tenure.errors import ConfigError
from tenure.planners import LLM, NOW
from tests.chats import assistant, chat_session, encode, tokenizer, user
from tests.oracles import Script, check_ledger, state_of
from tests.planners.chats import OPTIONS, drowned


def test_the_session_s_model_names_spans_and_steps_of_the_list(engines, monkeypatch):
    pytest.importorskip("llguidance")
    schema = LLM._schema

    def at_least_one(self, listed, steps):
        made = schema(self, listed, steps)
        made["properties"]["edges"]["minItems"] = 1
        return made

    monkeypatch.setattr(LLM, "_schema", at_least_one)  # a random model would rather name nothing
    options = {"spans": 6, "words": 3, "most": 2}
    session = drowned(engines, planner="llm", planner_options=options, plan=Plan([Step("fix")]))
    twin = drowned(engines, plan=Plan([Step("fix")]))
    session.queue(user("What is MAX_SHARDS?", span="q"), reply=True)
    stats = session.stats().planner
    assert stats["counts"]["llm.proposed"] > 0
    assert stats["problem"] is None or "does not fit" in stats["problem"]
    for edge in session.planning.edges:
        assert edge.span in session.memory.ledger.spans
        assert edge.step in ("fix", NOW)
        assert edge.why == "named by tiny-qwen2"
    # The fork that was asked has left no trace.
    twin.queue(user("What is MAX_SHARDS?", span="q"), reply=True)
    assert session.memory.ids == twin.memory.ids
    assert state_of(session)["backlog"] == state_of(twin)["backlog"]
    check_ledger(session)


def test_what_the_session_s_model_says_is_entered(engines, monkeypatch):
    pytest.importorskip("llguidance")
    session = drowned(engines, planner="llm", plan=Plan([Step("fix")]))
    answer = {"edges": [{"span": "rule", "step": "now"}, {"span": "codes", "step": "fix"}]}
    script = [*encode("chatml", json.dumps(answer)), tokenizer("chatml").eos_token_id]
    Script(script).install(monkeypatch)
    session.queue(user("What now?"), reply=True)
    assert session.plan.turn.spans == ("rule",)
    assert session.plan["fix"].spans == ("codes",)
    assert session.explain("rule").resident == 1.0


def test_a_step_may_be_called_now(engines, monkeypatch):
    answer = {"edges": [{"span": "rule", "step": "now!"}, {"span": "codes", "step": "now"}]}
    asked = []
    monkeypatch.setattr(LLM, "_local", lambda self, *args: (asked.append(args), json.dumps(answer))[1])
    session = drowned(engines, planner="llm", plan=Plan([Step("now"), Step("later")]))
    session.queue(user("What is it?"), reply=True)
    _, question, schema = asked[-1]
    assert schema["properties"]["edges"]["items"]["properties"]["step"]["enum"] == ["now", "later", "now!"]
    assert "- now!: What is it?" in question
    assert session.plan.turn.spans == ("rule",)
    assert session.plan["now"].spans == ("codes",)


def test_what_is_listed_and_when_it_is_asked(engines, monkeypatch):
    edges = [{"span": span, "step": "now"} for span in ("codes", "rule", "limits", "filler-0")]
    asked = []
    monkeypatch.setattr(
        LLM, "_local", lambda self, *args: (asked.append(args), json.dumps({"edges": edges}))[1]
    )
    options = {"every": 2, "spans": 4, "most": 1}
    session = drowned(engines, planner="llm", planner_options=options, budget=512)
    session.plan.supersede("filler-4", "filler-5")
    while len(asked) < 2:
        session.ask(user("And now?"), max_tokens=1)
        turn = session.planning.turn - 1
        assert bool(asked) == (turn >= 10), "nine of the assistant's turns came before"
    assert turn == 12, "each second turn asks"
    *_, schema = asked[0]
    listed = schema["properties"]["edges"]["items"]["properties"]["span"]["enum"]
    assert "filler-5" in listed
    assert "filler-4" not in listed, "a newer one has taken its place"
    assert len(listed) == 4
    assert "rule" not in listed, "the latest four"


def test_what_shares_words_with_the_turn_is_listed_however_old(engines, monkeypatch):
    asked = []
    monkeypatch.setattr(LLM, "_local", lambda self, *args: (asked.append(args[-1]), '{"edges": []}')[1])
    session = drowned(engines, planner="llm", planner_options={"spans": 4, "words": 2}, budget=512)
    fork = session.fork()
    for one in (session, fork):
        one.queue(user("And error E417, what means frozen?"), reply=True)
        listed = asked[-1]["properties"]["edges"]["items"]["properties"]["span"]["enum"]
        assert len(listed) == 4
        assert listed[0] in ("limits", "codes"), "in the order of the session"
        assert "codes" in listed, "told by words behind those that are shown"
        assert "filler-5" in listed, "half of them are the latest"


def test_what_is_pinned_is_not_listed(engines, monkeypatch):
    asked = []
    monkeypatch.setattr(LLM, "_local", lambda self, *args: (asked.append(args[-1]), '{"edges": []}')[1])
    session = chat_session(engines, **OPTIONS, planner="llm", regions={"user": {"pin": "soft"}})
    session.append([user("the rule", span="rule"), assistant("noted")])
    session.append({"role": "tool", "content": "ten", "span": "pinned", "pin": "soft"})
    session.append({"role": "tool", "content": "ten", "span": "plain"})
    session.queue({"role": "tool", "content": "eleven"}, reply=True)
    listed = asked[-1]["properties"]["edges"]["items"]["properties"]["span"]["enum"]
    assert "plain" in listed
    assert not {"rule", "pinned"} & set(listed)


def test_no_more_edges_than_asked_for_and_no_answer_too_deep(engines, monkeypatch):
    answers = [
        json.dumps({"edges": [{"span": span, "step": "now"} for span in ("codes", "rule", "limits")]}),
        "[" * 100_000,
    ]
    monkeypatch.setattr(LLM, "_local", lambda self, *args: answers.pop(0))
    session = drowned(engines, planner="llm", planner_options={"most": 2}, budget=512)
    session.queue(user("And now?"), reply=True)
    assert session.plan.turn.spans == ("codes", "rule")
    session.start_turn(max_tokens=1).close()
    session.queue(user("And now?"), reply=True)
    assert session.plan.turn is None
    assert "not the JSON that was asked for" in session.stats().planner["problem"]


class Endpoint(BaseHTTPRequestHandler):
    """Answers as it is told to, and keeps what it was asked."""

    answers: tuple[int, object] = (200, "")
    asked: list[dict] = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append({"path": self.path, "key": self.headers["Authorization"], **body})
        status, content = self.answers
        data = json.dumps(
            {"choices": [{"message": {"content": content}}]} if status == 200 else content
        ).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def endpoint():
    pytest.importorskip("httpx")
    Endpoint.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_another_model_is_asked_by_url(engines, endpoint, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "secret")
    options = {"url": endpoint, "model": "big", "key": "SOME_KEY"}
    session = drowned(engines, planner="llm", planner_options=options)
    Endpoint.answers = (
        200,
        json.dumps({"edges": [{"span": "rule", "step": "now"}, {"span": "made up", "step": "now"}, 3]}),
    )
    session.queue(user("Round it, please."), reply=True)
    assert session.plan.turn.spans == ("rule",)
    assert session.explain("rule").edges[0].why == "named by big"
    asked = Endpoint.asked[0]
    assert asked["path"] == "/v1/chat/completions"
    assert asked["key"] == "Bearer secret"
    assert "- rule (user): class FeeRule rounds" in asked["messages"][0]["content"]
    assert "- now: Round it, please." in asked["messages"][0]["content"]
    edge = asked["response_format"]["json_schema"]["schema"]["properties"]["edges"]["items"]["properties"]
    assert "rule" in edge["span"]["enum"]
    assert edge["step"]["enum"] == ["now"]


@pytest.mark.parametrize("on", ["reply", "message"])
def test_a_restored_session_lists_the_spans_of_before(engines, endpoint, tmp_path, on):
    Endpoint.answers = (200, json.dumps({"edges": [{"span": "rule", "step": "now"}]}))
    session = drowned(engines, planner="llm", planner_options={"url": endpoint, "on": on})
    session.save(tmp_path / "session")
    Endpoint.asked.clear()
    again = session.engine.restore(tmp_path / "session")
    assert not Endpoint.asked, "nothing is asked while it comes back"
    ours, theirs = (dict(vars(one.planning.planners[0])) for one in (again, session))
    index, other = ours.pop("_index"), theirs.pop("_index")
    assert ours == theirs
    assert index.scores(["rounds"]) == other.scores(["rounds"]) != {}
    for one in (session, again):
        one.queue(user("Round it, please."), reply=True)
        assert one.plan.turn.spans == ("rule",)
        assert one.explain("rule").resident == 1.0
    questions = [asked["messages"][0]["content"] for asked in Endpoint.asked]
    assert "- rule (user): class FeeRule rounds" in questions[1]
    assert questions[0] == questions[1]
    assert state_of(again) == state_of(session)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((500, "broken"), "500"),
        ((200, "no json"), "not the JSON that was asked for"),
        ((200, "[]"), "no list of edges"),
        ((200, '{"edges": 3}'), "no list of edges"),
    ],
)
def test_an_endpoint_that_fails_costs_a_note(engines, endpoint, answer, words):
    session = drowned(engines, planner="llm", planner_options={"url": endpoint})
    Endpoint.answers = answer
    session.ask(user("Round it, please."), max_tokens=2)
    assert session.plan.turn is None
    assert words in session.stats().planner["problem"]
    check_ledger(session)


def test_an_endpoint_that_is_not_there_costs_a_note(engines):
    pytest.importorskip("httpx")
    session = drowned(engines, planner="llm", planner_options={"url": "http://127.0.0.1:9/v1", "timeout": 1})
    session.ask(user("Round it, please."), max_tokens=2)
    assert "no usable answer" in session.stats().planner["problem"]


@pytest.mark.parametrize(
    ("options", "words"), [({"every": 0}, "every: 0 is too small"), ({"on": "x"}, "on: 'x' is not known")]
)
def test_bad_options(engines, options, words):
    with pytest.raises(ConfigError, match=words):
        chat_session(engines, **OPTIONS, planner="llm", planner_options=options)
