"use strict";
// Reads back what stretto/report/pack.py made small: compressed JSON in script elements that no browser runs.

const known = new Map();

/** The value of a blob of the page, or null where the page holds none of that name. */
function unpack(name) {
  if (!known.has(name)) known.set(name, inflate(name));
  return known.get(name);
}

async function inflate(name) {
  const element = document.getElementById(name);
  if (!element) return null;
  const bytes = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

/** A run's timeline as columns, times in seconds. */
async function timelineOf(run) {
  const packed = await unpack(`timeline-${run}`);
  let start = 0;
  const starts = packed.start.map((more) => (start += more) / 1e4);
  return { ...packed, start: starts, length: packed.length.map((each) => each / 1e4) };
}

/** A conversation as tokens: {text, trained, logprob, advantage, gap}, numbers null where there are none. */
function tokensOf(conversation) {
  const trained = [];
  conversation.runs.forEach((count, index) => trained.push(...Array(count).fill(index % 2 === 1)));
  const advantages = (conversation.advantages ?? []).flatMap(([value, count]) => Array(count).fill(value));
  const letters = Array.from(conversation.text ?? "");
  let sampled = 0;
  let place = 0;
  return trained.map((mine, index) => {
    const width = conversation.widths?.[index];
    const text = width === undefined ? `‹${conversation.tokens[index]}›` : letters.slice(place, place + width).join("");
    place += width ?? 0;
    const token = { index, text, trained: mine, logprob: null, advantage: null, gap: null };
    if (mine) {
      const logprob = conversation.logprobs?.[sampled];
      const trainer = conversation.trainer_logprobs?.[sampled];
      token.logprob = logprob === undefined ? null : logprob / 1000;
      token.advantage = advantages.length ? advantages[sampled] / 1000 : null;
      token.gap = trainer === undefined || logprob === undefined ? null : (trainer - logprob) / 1000;
      sampled += 1;
    }
    return token;
  });
}
