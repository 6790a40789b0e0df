"""Rewards of one's own: plain functions that stretto calls in worker processes, never in the training process."""


def close(answer: str, prompt: dict, signals: dict) -> float:
    """Partial credit: how near the answer is to the right number of the right letter, from 0 to 1.

    `answer` is what the model said. `prompt` has "id", "messages", "reference" (the column `answer`, or None) and
    "tags" (all other columns of the row). `signals` are numbers from the environment: "tokens" and "truncated".
    """
    letter, times = prompt["tags"]["letter"], prompt["tags"]["times"]
    right = answer.count(letter)
    wrong = len(answer) - right
    return max(0.0, 1.0 - (abs(times - right) + wrong) / times)
