"""A server in a process of its own stops cleanly, and when it is killed it leaves no port."""

import concurrent.futures
import http.client
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from command_line import ROOT
from serving import post, send

for package in ("starlette", "uvicorn", "pydantic", "sse_starlette", "prometheus_client"):
    pytest.importorskip(package)

TINY = ROOT / "checkpoints" / "tiny"
ASK = {"prompt": "def main(", "max_tokens": 12, "seed": 3, "temperature": 0.8}


def test_a_process_stops_cleanly_and_a_killed_one_leaves_no_port():
    """After SIGTERM what runs is finished, new requests get 503, and the status is 0. After
    SIGKILL another server takes the port."""
    words = ["--target", str(TINY / "target"), "--capacity", "240", "--slots", "1", "--no-lookup",
             "--chunk", "32", "--logprobs", "-1"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def begin(port: int) -> tuple[subprocess.Popen, int]:
        command = [sys.executable, "-m", "specjax", "serve", *words, "--port", str(port)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        line = process.stdout.readline()
        assert line.startswith("serving target with the drafters none on http://127.0.0.1:"), (
            line + process.stderr.read()
        )
        return process, int(line.rsplit(":", 1)[1])

    long = {**ASK, "max_tokens": 220, "ignore_eos": True, "n": 16}
    process, port = begin(0)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = pool.submit(post, port, "/v1/completions", long)
        while b'requests_running{model_name="target"} 1.0' not in send(port, "GET", "/metrics")[2]:
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
        status, _, content = send(port, "POST", "/v1/completions", ASK)
        assert status == 503 and b"is stopping" in content
        assert send(port, "GET", "/health")[0] == 503
        answer = running.result(120)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 16
    assert process.wait(60) == 0, process.stderr.read()
    process.stdout.close()
    process.stderr.close()

    process, again = begin(port)
    assert again == port
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = pool.submit(post, port, "/v1/completions", long)
        time.sleep(0.1)
        process.kill()
        with pytest.raises((OSError, http.client.HTTPException)):
            running.result(60)
    process.wait(30)
    process.stdout.close()
    process.stderr.close()
    with socket.create_server(("127.0.0.1", port)):
        pass
