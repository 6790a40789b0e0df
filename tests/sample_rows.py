"""Rows of a samples file, as a run would write them."""


def row(attempt=0, value=1.0, *, parts=None, used=True, failure=None, answer="7", advantage=0.5, prompt="p1"):
    reward = {"value": value, "outcome": value, "parts": parts or {"format": 0.0, "correct": value}}
    talk = {"tokens": [5, 6, 7], "trained": [0, 1, 1], "advantages": [0, advantage, advantage], "stop": "stop"}
    return {
        "step": 3, "prompt": prompt, "visit": 0, "attempt": attempt, "messages": [{"role": "user", "content": "3+4?"}],
        "conversations": [talk | {"text": "<|user|>3+4?<|assistant|>7"}], "answer": answer, "reference": "7",
        "reward": None if failure else reward, "failure": failure, "used": used,
    }  # fmt: skip
