"""`stretto serve` as a process: it says where, answers who has the key, and ends with Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from running import written

KEY = "a-key-of-ones-own"


def asked(url, key):
    """(status, JSON) of a chat."""
    body = json.dumps({"messages": [{"role": "user", "content": "01="}], "max_tokens": 3, "temperature": 0})
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/chat/completions", body.encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.slow
def test_a_model_is_served_until_ctrl_c(tmp_path):
    command = [sys.executable, "-m", "stretto", "serve", str(written(tmp_path)), "--port", "0"]
    surroundings = {**os.environ, "STRETTO_API_KEY": KEY, "PYTHONUNBUFFERED": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, env=surroundings, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            shown = next(line for line in process.stdout if "OPENAI_BASE_URL=" in line)
            url = shown.partition("OPENAI_BASE_URL=")[2].split()[0]
            assert url.startswith("http://127.0.0.1:") and KEY not in shown
            status, answer = asked(url, KEY)
            assert status == 200 and answer["usage"]["completion_tokens"] <= 3
            assert asked(url, KEY)[1]["choices"][0]["message"] == answer["choices"][0]["message"], "greedy"
            assert asked(url, "another")[0] == 401
            process.send_signal(signal.SIGINT)
            _, complaint = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in complaint
