"""A model handle that says what a test wants, in characters, and keeps what it was asked."""

import asyncio

import numpy as np

from stretto.engines.base import Completion
from stretto.environments.chat import ModelHandle, Sampling
from stretto.environments.render import Renderer
from stretto.models.scratch import character_tokenizer

TOKENIZER = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
END = TOKENIZER.eos_token_id


class Talk(ModelHandle):
    """`say` is a list of what to say, or a function of the text so far; `request` is what was asked last."""

    def __init__(self, prompt, say, *, context=2000, limit=400, tokenizer=TOKENIZER):
        self.say, self.read = say, []
        super().__init__(
            prompt=prompt,
            visit=0,
            attempt=0,
            sampling=Sampling(seed=0, temperature=1.0, max_new_tokens=limit, context=context),
            renderer=Renderer(tokenizer, stop=frozenset({END})),
            generate=self._generate,
        )

    async def _generate(self, request):
        self.request, text = request, TOKENIZER.decode(request.tokens.tolist())
        self.read.append(text)
        said = self.say(text) if callable(self.say) else self.say[len(self.read) - 1]
        tokens = [*TOKENIZER.encode(said, add_special_tokens=False), END][: request.max_new_tokens]
        return Completion(
            key=request.key,
            tokens=np.array(tokens, dtype=np.int64),
            logprobs=np.full(len(tokens), -1.0),
            stop="stop" if tokens[-1] == END else "length",
            version=0,
        )

    def texts(self):
        """The whole of each conversation."""
        return [TOKENIZER.decode(each.tokens.tolist()) for each in self.conversations()]

    def trained(self):
        """What is trained of each."""
        return [TOKENIZER.decode(each.tokens[each.trained].tolist()) for each in self.conversations()]


def played(environment, prompt, say, **keywords):
    """The outcome, and the model that was talked to."""
    talk = Talk(prompt, say, **keywords)
    return asyncio.run(environment(prompt, talk)), talk
