"""Servers of vLLM and SGLang, without either: they say over HTTP what one says, of a tiny policy of their own.

What a test wants to be wrong is a field of it: how it was started, or what it does with an adapter.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors.torch import load_file

from stretto.engines.served.probe import own_logprobs
from stretto.engines.vllm.published import adapter_scale, sent_name
from tiny import scratch_policy


class FakeServer:
    """vLLM; listens on a port of this host until it is closed."""

    keyed = "/v1", "/inference"
    missing = 404, {"error": {"message": "The model does not exist."}}

    def __init__(self, *, adapter=None, **sizes):
        self.policy = None if adapter is None else scratch_policy(adapter=adapter, **sizes)
        self.lock = threading.Lock()
        # How it was started.
        self.version, self.key, self.updating, self.scales_out, self.context = (
            {"version": "0.32.0"},
            "",
            True,
            True,
            256,
        )
        self.models, self.processed, self.refuses = ["/models/base"], True, None
        # What it has, what it was asked, and how it spoils what it is sent.
        self.adapters, self.requests, self.unloaded = {}, [], []
        self.takes = lambda name, tensors: tensors
        self.hold = threading.Event()
        self.hold.set()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(self))
        self.http.daemon_threads = True
        self.http.handle_error = lambda *told: None  # who asked has hung up
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.hold.set()
        self.http.shutdown()
        self.http.server_close()

    def get(self, path):
        if path == "/version":
            return 200, self.version
        if path == "/health":
            return 200, ""
        cards = [{"id": name, "root": name, "parent": None, "max_model_len": self.context} for name in self.models]
        cards += [{"id": name, "root": root, "parent": self.models[0]} for name, (root, _) in self.adapters.items()]
        return 200, {"data": cards}

    def post(self, path, body):
        if path.endswith("lora_adapter") and not self.updating:
            return 404, {"detail": "Not Found"}
        if path == "/inference/v1/generate" and not self.scales_out:
            return 403, {"error": {"message": "Scale-out endpoints are disabled."}}
        if "/" in body.get("cache_salt", ""):  # as a model's folder has it
            return 400, {"error": {"message": "Parameter 'cache_salt' must not contain '/'."}}
        if not body:
            return 400, {"error": {"message": "Field required"}}
        if path == "/v1/load_lora_adapter":
            return self.load(body["lora_name"], Path(body["lora_path"]))
        if path == "/v1/unload_lora_adapter":
            self.unloaded.append(body["lora_name"])
            return (
                (200, "gone") if self.adapters.pop(body["lora_name"], None) else (404, {"error": {"message": "none"}})
            )
        return self.scored(body)

    def load(self, name, folder):
        if self.refuses is not None:
            return 500, {"error": {"message": self.refuses.replace("FOLDER", str(folder))}}
        if not folder.exists():
            return 404, {"error": {"message": f"Loading lora {name} failed: No adapter found for {folder}"}}
        assert name not in self.adapters
        tensors = load_file(folder / "adapter_model.safetensors")
        self.adapters[name] = str(folder), self.takes(name, tensors)
        return 200, "Success"

    def adapter_of(self, body):
        """What a request is for, if it is there."""
        return body["model"] if body["model"] in self.adapters else None

    def scored(self, body):
        """Log-probabilities of a prompt, and of tokens 9 that follow."""
        params, tokens = body["sampling_params"], body["token_ids"]
        with self.lock:
            said = [*tokens, *[9] * params["max_tokens"]]
            at_one = self.says(self.adapter_of(body), said, 1.0)
            hot = self.says(self.adapter_of(body), said, params["temperature"]) if self.processed else at_one
        rows = [{str(token): {"logprob": at}} for token, at in zip(tokens[1:], at_one, strict=False)]
        new = [{"token_id": 9, "logprob": at} for at in hot[len(tokens) - 1 :]]
        choice = {"token_ids": [9] * len(new), "logprobs": {"content": new}, "finish_reason": "length"}
        return 200, {"prompt_logprobs": [None, *rows], "choices": [choice]}

    def says(self, model, tokens, temperature):
        if model is None:
            with self.policy.without_adapter():
                return own_logprobs(self.policy, tokens, temperature=temperature).tolist()
        scale, held = adapter_scale(self.policy), self.adapters[model][1]
        with torch.no_grad():
            for name, weight in self.policy.trained().items():
                tensor = held[f"base_model.model.{sent_name(name)}"]
                weight.copy_(tensor / scale if ".lora_B." in name else tensor)
        return own_logprobs(self.policy, tokens, temperature=temperature).tolist()

    def streamed(self, body, write):
        """Tokens 9, as many as are wanted, some at once; the last alone, and only when nothing holds it."""
        params = body["sampling_params"]
        most = min(params["max_tokens"], self.context - len(body["token_ids"]))
        for count, ended in ((most - 1, None), (1, "length")):
            if ended:
                self.hold.wait(20)
            write({"choices": [self.choice(count, ended)]})

    def choice(self, count, ended):
        content = [{"token_id": 9, "logprob": -1.0}] * count
        return {"token_ids": [9] * count, "logprobs": {"content": content}, "finish_reason": ended}


class FakeSglang(FakeServer):
    """SGLang, which tells all that has come of an answer again, or with `incremental` only what is new."""

    keyed = ("/",)
    missing = 200, {"error": {"message": "Got LoRA adapter that has never been loaded: policy-v1"}}

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.version = {"version": "0.5.23", "enable_lora": True, "dp_size": 1}
        self.incremental, self.matched = False, 0

    def get(self, path):
        return (200, self.version) if path == "/server_info" else super().get(path)

    def post(self, path, body):
        if path in ("/load_lora_adapter", "/unload_lora_adapter"):
            status, told = super().post(f"/v1{path}", body)
            words = told if isinstance(told, str) else told["error"]["message"]
            return (200 if status == 200 else 400), {"success": status == 200, "error_message": words}
        return self.scored(body)

    def adapter_of(self, body):
        name = body.get("lora_path")
        return name if name in self.adapters else None

    def scored(self, body):
        params, tokens = body["sampling_params"], body["input_ids"]
        asked = {**params, "max_tokens": params["max_new_tokens"]}
        _, told = super().scored({**body, "sampling_params": asked, "token_ids": tokens})
        prompt = [[row[str(token)]["logprob"], token, None] for row, token in zip(
            told["prompt_logprobs"][1:], tokens[1:], strict=False)]  # fmt: skip
        (choice,) = told["choices"]
        said = [[each["logprob"], 9, None] for each in choice["logprobs"]["content"]]
        meta = {"input_token_logprobs": [[None, tokens[0], None], *prompt], "output_token_logprobs": said}
        return 200, {"output_ids": choice["token_ids"], "meta_info": meta}

    def streamed(self, body, write):
        params = body["sampling_params"]
        most = params["max_new_tokens"]
        if most + len(body["input_ids"]) > self.context:
            write({"error": {"message": "Requested token count exceeds the model's maximum context length"}})
            return
        reason = {"type": "length"} if params["ignore_eos"] or self.matched != 9 else {"type": "stop", "matched": 9}
        for have, ended in ((most - 1, None), (most, reason)):
            if ended:
                self.hold.wait(20)
            new = (1 if ended else have) if self.incremental else have
            meta = {"completion_tokens": have, "finish_reason": ended, "output_token_logprobs": [[-1.0, 9, None]] * new}
            write({"output_ids": [9] * new, "meta_info": meta})


def handler_of(server):
    """What answers for it."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *words):
            pass

        def allowed(self):
            sent = self.headers.get("Authorization")
            return not server.key or not self.path.startswith(server.keyed) or sent == f"Bearer {server.key}"

        def answer(self, status, told):
            data = told.encode() if isinstance(told, str) else json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def write(self, told):
            self.wfile.write(f"data: {json.dumps(told)}\n\n".encode())
            self.wfile.flush()

        def do_GET(self):
            self.answer(*(server.get(self.path) if self.allowed() else (401, {"error": "Unauthorized"})))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.allowed():
                self.answer(401, {"error": "Unauthorized"})
            elif body.get("stream"):
                server.requests.append(body)
                status, told = (200, None) if server.adapter_of(body) else server.missing
                if status != 200:
                    self.answer(status, told)
                    return
                self.send_response(200)
                self.end_headers()
                if told:
                    self.write(told)
                    return
                server.streamed(body, self.write)
                self.wfile.write(b"data: [DONE]\n\n")
            else:
                self.answer(*server.post(self.path, body))

    return Handler
