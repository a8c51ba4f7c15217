"""The page over HTTP: who may ask, what is refused in one line, one search at a time, and files by name alone."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs starlette: pip install 'hexiopt[page]'")

from starlette.testclient import TestClient

from experiments.web import searches
from experiments.web.app import application
from experiments.web.guard import MAX_BODY_BYTES, Guard
from tests.conftest import ROOT

PORT = 8765
ORIGIN = f"http://127.0.0.1:{PORT}"
QUESTION: dict[str, Any] = {
    "task": "plan",
    "pcs": [[["3090", 1], ["RTX 4090", 1]]],
    "network": "10",
    "model": "llama2_7b",
    "training": "lora",
    "rank": 16,
    "seq_len": 1024,
    "global_batch": 8,
    "seconds": 1,
}


@pytest.fixture
def guard(tmp_path: Path) -> Guard:
    return application(tmp_path, PORT)


@pytest.fixture
def client(guard: Guard) -> Iterator[TestClient]:
    """A browser that has opened the printed address."""
    with TestClient(guard, base_url=ORIGIN, headers={"origin": ORIGIN}) as opened:
        assert opened.get(guard.address.removeprefix(ORIGIN)).status_code == 200
        yield opened


def post(client: TestClient, question: Any, **headers: str) -> Any:
    return client.post("/search", json=question, headers=headers)


def test_the_token_gives_a_cookie_that_no_script_and_no_other_site_has(guard: Guard) -> None:
    client = TestClient(guard, base_url=ORIGIN)
    for path in ("/", "/?token=", "/?token=wrong", "/?token=%C3%A9", f"/file/a/plan.json?token={guard.token}"):
        assert client.get(path).status_code == 403, path
    assert client.get("/", headers={"cookie": f"hexiopt-{PORT}={guard.token}"}).status_code == 403
    opened = client.get(guard.address.removeprefix(ORIGIN))
    cookie = opened.headers["set-cookie"]
    assert (cookie.split("=")[0], cookie.partition("; ")[2]) == (f"hexiopt-{PORT}", "Path=/; HttpOnly; SameSite=Strict")
    assert guard.token not in cookie + opened.text
    again = client.get("/")
    assert (again.status_code, "set-cookie" in again.headers) == (200, False)
    assert guard.token not in repr(guard)


@pytest.mark.parametrize(
    "host", ["evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:1", "0.0.0.0:8765", ""]
)
def test_another_name_of_this_machine_is_refused(client: TestClient, guard: Guard, host: str) -> None:
    for path in ("/", guard.address.removeprefix(ORIGIN)):
        refused = client.get(path, headers={"host": host})
        assert (refused.status_code, "set-cookie" in refused.headers) == (403, False)


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "", "https://127.0.0.1:8765", "http://127.0.0.1"])
def test_a_post_of_another_page_is_refused(client: TestClient, origin: str) -> None:
    assert post(client, QUESTION, origin=origin).status_code == 403


def test_a_form_of_another_page_cannot_send_json(client: TestClient) -> None:
    sent = client.post("/search", content=json.dumps(QUESTION), headers={"content-type": "text/plain"})
    assert sent.status_code == 415


def test_policies_let_the_page_run_its_own_script_alone(client: TestClient) -> None:
    first, second = client.get("/"), client.get("/")
    policy = first.headers["content-security-policy"]
    nonce = policy.partition("'nonce-")[2].partition("'")[0]
    assert f'<script nonce="{nonce}">' in first.text
    assert nonce not in second.text
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert first.headers["cache-control"] == "no-store"
    assert first.headers["x-content-type-options"] == "nosniff"
    assert "http://" not in first.text.replace(ORIGIN, "")
    assert "https://" not in first.text


def test_a_large_body_is_refused_stated_or_in_pieces(client: TestClient) -> None:
    json_type = {"content-type": "application/json"}
    assert client.post("/search", content=b" " * (MAX_BODY_BYTES + 1), headers=json_type).status_code == 413
    pieces = (b" " * 1000 for _ in range(MAX_BODY_BYTES // 1000 + 1))
    assert client.post("/search", content=pieces, headers=json_type).status_code == 413


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 15_000, b"\xff\xfe", b"NaN"])
def test_what_is_not_json_is_refused(client: TestClient, body: bytes) -> None:
    sent = client.post("/search", content=body, headers={"content-type": "application/json"})
    assert sent.status_code == 400
    assert "\n" not in sent.text


REFUSED = [
    ({"pcs": []}, r"pcs: 0 is out of range; state 1 to 16 PCs"),
    ({"pcs": [[]]}, r"pcs: a PC has no cards"),
    ({"pcs": [["3090"]]}, r"pcs: .* is no pair of a card and a number"),
    ({"pcs": [[["3090", 0]]]}, r"pcs: 0 is no number of cards"),
    ({"pcs": [[["3090", True]]]}, r"pcs: True is no number of cards"),
    ({"pcs": [[["3090", 40], ["4090", 40]]]}, r"pcs: 80 cards are too many for the page"),
    ({"pcs": [[["x" * 81, 1]]]}, r"pcs: .* is no pair of a card and a number"),
    ({"pcs": [[["4o90", 1]]]}, r"cards: '4o90' is not a known GPU; "),
    ({"pcs": [[["a100", 1]]]}, r"cards: 'a100' may be a100_40gb_pcie or "),
    ({"network": "3"}, r"network: '3' is not known"),
    ({"model": "/etc/passwd"}, r"model: '/etc/passwd' is neither shipped nor a name ORG/NAME on the Hub"),
    ({"model": "../../etc/passwd"}, r"model: .* is neither shipped nor a name"),
    ({"model": "conf/model"}, r"model: 'conf/model' is neither shipped nor a name"),  # a folder here
    ({"model": "config.json"}, r"model: 'config.json' is neither shipped nor a name"),
    ({"model": 3}, r"model: 3 is not text"),
    ({"training": "dora"}, r"training: 'dora' is not known"),
    ({"rank": 0}, r"rank: 0 is out of range"),
    ({"seq_len": 1.5}, r"seq_len: 1.5 is not a whole number"),
    ({"global_batch": 10**9}, r"global_batch: 1000000000 is out of range"),
    ({"seconds": 10**6}, r"seconds: 1000000 is out of range"),
    ({"seconds": None}, r"seconds: "),
    ({"task": "rm"}, r"task: 'rm' is not known"),
    ({"training": "full_4bit"}, r"training: 'full_4bit' is not known"),
    ({"second": 1}, r"second: unknown key; did you mean seconds\?"),
]


@pytest.mark.parametrize(("change", "why"), REFUSED, ids=[str(change)[:40] for change, _ in REFUSED])
def test_a_question_out_of_range_is_one_line(
    client: TestClient, change: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    sent = post(client, QUESTION | change)
    assert sent.status_code == 400
    assert "\n" not in sent.text
    assert re.search(why, sent.text), sent.text


@pytest.mark.parametrize("question", [3, [], "x"])
def test_a_question_that_is_no_mapping_is_one_line(client: TestClient, question: Any) -> None:
    sent = post(client, question)
    assert (sent.status_code, "\n" in sent.text) == (400, False)


@pytest.mark.parametrize(
    "path", ["/file/a/plan.json", "/file/../../etc/passwd", "/file/a/..%2f..%2fetc%2fpasswd", "/file//etc/passwd", "/x"]
)
def test_files_are_had_by_name_alone(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_methods_that_nothing_takes_are_refused(client: TestClient) -> None:
    assert client.get("/search").status_code == 405
    assert client.put("/", headers={"content-type": "application/json"}).status_code == 405


@pytest.mark.slow
def test_a_search_says_what_it_has_and_leaves_files(client: TestClient, tmp_path: Path) -> None:
    sent = post(client, QUESTION)
    news = [json.loads(line) for line in sent.text.splitlines() if line]
    answer, key = news[-1], news[0]["key"]
    assert answer.get("fits"), answer
    lines = dict(answer["lines"])
    assert (answer["verdict"], [*lines]) == ("FITS", ["speed", "limits", "plan", "beside", "reason"])
    assert re.match(r"[\d,]+ tokens/s; .*\[[ABC]\b", lines["speed"]), lines["speed"]
    assert lines["limits"].endswith("(exact for one pipeline)")
    assert answer["commands"][-1] == "hexiopt train plan=plan.json"
    assert all(0 < sum(part["share"] for part in bar["parts"]) <= 1 for bar in answer["bars"])
    got = {name: client.get(f"/file/{key}/{name}") for name in answer["files"]}
    assert {*got} == {"plan.json", "report.html", "timeline.json", "plan.png", "cluster.yaml", "command.txt"}
    assert all(file.status_code == 200 for file in got.values())
    assert got["plan.json"].json()["format"] == "hexiopt.plan"
    assert got["plan.png"].content.startswith(b"\x89PNG")
    assert got["plan.json"].headers["content-disposition"].startswith("attachment")
    assert got["report.html"].headers["content-disposition"].startswith("inline")
    assert got["report.html"].headers["content-security-policy"].startswith("sandbox allow-scripts")
    for path in (f"/file/{key}/question", f"/file/{key}/plan.json/x", f"/file/{key}/%2e%2e%2fplan.json"):
        assert client.get(path).status_code in (404, 405), path


@pytest.mark.slow
def test_a_search_ends_with_a_server_that_was_killed(tmp_path: Path) -> None:
    """Which closes the stdin of the search, and says nothing more."""
    command = [sys.executable, "-P", "-m", "experiments.web.job", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as job:
        assert job.stdin is not None
        assert job.stdout is not None
        job.stdin.write(json.dumps(QUESTION | {"seconds": 100}) + "\n")
        job.stdin.flush()
        assert "progress" in job.stdout.readline()
        job.stdin.close()
        assert job.wait(timeout=20) == -signal.SIGKILL


def _job(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    """Let searches run `code`."""
    (folder / "stand_in.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(searches, "_JOB", "stand_in")


def test_a_second_search_waits_for_the_first_to_end(
    guard: Guard, client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = 'import sys, time; sys.stdin.readline(); print(\'{"progress": "begun"}\', flush=True); time.sleep(2)'
    _job(monkeypatch, tmp_path, code)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(post, client, QUESTION)
        time.sleep(1.0)
        second = post(client, QUESTION)
        assert (second.status_code, second.text) == (409, "a search is running; one at a time")
        assert "ended unexpectedly, with code 0" in first.result().text
    assert "ended unexpectedly" in post(client, QUESTION).text, "the next search begins"


def test_only_the_files_of_the_newest_searches_are_kept(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import pathlib, sys; pathlib.Path(sys.argv[1], 'plan.json').write_text('{}'); print('{\"done\": true}')"
    _job(monkeypatch, tmp_path, code)
    monkeypatch.setattr(searches, "_MOST_FOLDERS", 1)
    keys = [json.loads(post(client, QUESTION).text.splitlines()[0])["key"] for _ in range(2)]
    assert [client.get(f"/file/{key}/plan.json").status_code for key in keys] == [404, 200]
    assert client.get(f"/file/{keys[1]}/plan.png").status_code == 404, "which the search did not write"
