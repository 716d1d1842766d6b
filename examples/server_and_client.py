"""A server, and a client that reads a streamed answer: python examples/server_and_client.py [MODEL]

Needs `pip install 'outrider[server]' openai`. Usually the server runs by itself: `outrider serve MODEL --port 8000`.
"""

import socket
import subprocess
import sys
import time
import urllib.request

import openai

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
with socket.create_server(("127.0.0.1", 0)) as unused:
    URL = f"http://127.0.0.1:{unused.getsockname()[1]}"


def is_ready() -> bool:
    try:
        return urllib.request.urlopen(f"{URL}/health", timeout=5).status == 200
    except OSError:
        return False


command = ["serve", MODEL, "--served-model-name", "mine", "--port", URL.rpartition(":")[2]]
server = subprocess.Popen([sys.executable, "-m", "outrider.cli", *command])
try:
    while not is_ready():
        if server.poll() is not None:
            sys.exit("the server ended")
        time.sleep(0.2)
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
    question = [{"role": "user", "content": "What is a tide?"}]
    for chunk in client.chat.completions.create(model="mine", messages=question, max_tokens=32, stream=True):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print(f"\nmodels: {[model.id for model in client.models.list()]}")
finally:
    server.terminate()
    server.wait()
