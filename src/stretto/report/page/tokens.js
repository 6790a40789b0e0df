// An answer token by token: what was context and what the model drew, with log-probability, advantage and the gap between
// engine and trainer; conversations and their turns as a tree.

const CHANNELS = {
  advantage: { label: "advantage", says: "green was made likelier, red less likely", value: (token) => token.advantage, paint: diverging },
  logprob: { label: "log-prob", says: "the stronger, the more surprising to the model", value: (token) => token.logprob, paint: (value, most) => faded(colour("line-1"), 0.6 * Math.min(1, -value / most)) },
  gap: { label: "engine-trainer gap", says: "trainer's log-probability less the engine's", value: (token) => token.gap, paint: diverging },
  mask: { label: "mask", says: "what the model drew and is trained on", value: (token) => (token.trained ? 1 : null), paint: () => faded(colour("accent"), 0.22) },
};
const MOST_TOKENS = 4000;

function diverging(value, most) {
  const share = Math.min(1, Math.abs(value) / most);
  return value ? faded(colour(value > 0 ? "good" : "bad"), 0.12 + 0.38 * share) : "";
}

function drawTokens(place, attempt, state, redraw) {
  const conversations = attempt.conversations;
  const chosen = Math.min(state.conversation ?? 0, Math.max(0, conversations.length - 1));
  if (!conversations.length) return show(place, h("p.lead", {}, "Nothing was sampled: there is no conversation."));
  const conversation = conversations[chosen];
  const tokens = tokensOf(conversation);
  const there = Object.keys(CHANNELS).filter((name) => tokens.some((token) => CHANNELS[name].value(token) !== null));
  const channel = there.includes(state.channel) ? state.channel : there[0] ?? "mask";
  const reading = h("div.reading", {}, "Point at a token.");
  const text = h("div.tokens", { "data-channel": channel }, spansOf(tokens, channel, reading));
  const buttons = there.map((name) => h(`button.tab${name === channel ? ".on" : ""}`, { onclick: () => { state.channel = name; redraw(); } }, CHANNELS[name].label));
  return show(place,
    h("div.tokens-head", {}, h("h4", {}, `Attempt ${attempt.attempt}, token by token`), h("div.tabs", {}, buttons), h("span.says", {}, CHANNELS[channel].says)),
    h("div.tokens-body", {}, tree(conversations, chosen, text, state, redraw), h("div.text", {}, text, reading)));
}

function spansOf(tokens, channel, reading) {
  const { value, paint } = CHANNELS[channel];
  const sizes = tokens.map(value).filter((each) => each !== null).map(Math.abs);
  const most = Math.max(1e-6, sizes.sort((one, other) => one - other)[Math.floor(sizes.length * 0.95)] ?? 1);
  const spans = tokens.slice(0, MOST_TOKENS).map((token) => {
    const number = value(token);
    const span = h(`span.token${token.trained ? ".drawn" : ""}`, { "data-index": token.index, style: number === null ? null : { background: paint(number, most) } }, token.text || "·");
    span.addEventListener("mouseenter", () => show(reading, ...told(token)));
    return span;
  });
  if (tokens.length > MOST_TOKENS) spans.push(h("p.lead", {}, `… and ${plural(tokens.length - MOST_TOKENS, "more token")}`));
  return spans;
}

function told(token) {
  const entries = [["token", String(token.index)], ["", JSON.stringify(token.text)], ["", token.trained ? "drawn by the model" : "context"]];
  if (token.logprob !== null) entries.push(["log-prob", short(token.logprob)], ["probability", percent(Math.exp(token.logprob))]);
  if (token.advantage !== null) entries.push(["advantage", short(token.advantage)]);
  if (token.gap !== null) entries.push(["gap", short(token.gap)]);
  return entries.map(([name, value]) => h("span", {}, name ? `${name} ` : "", h("b", {}, value)));
}

/** Conversations below the one that they branched off, each with its turns. */
function tree(conversations, chosen, text, state, redraw) {
  const below = (parent) => conversations.map((each, index) => [each, index]).filter(([each]) => (each.parent ? each.parent[0] : null) === parent);
  const branch = (parent) => below(parent).map(([conversation, index]) => h("li", {},
    h(`button.node${index === chosen ? ".on" : ""}`, { onclick: () => { state.conversation = index; redraw(); } },
      `conversation ${index + 1}`, h("small", {}, conversation.parent ? `shares ${plural(conversation.parent[1], "token")}` : `ends with ${conversation.stop}`)),
    index === chosen ? turns(conversation, text) : null,
    below(index).length ? h("ul", {}, branch(index)) : null));
  return h("nav.tree", {}, h("ul", {}, branch(null)));
}

function turns(conversation, text) {
  let start = 0;
  const entries = conversation.runs.map((count, index) => {
    const from = start;
    start += count;
    if (!count) return null;
    const mine = index % 2 === 1;
    const go = () => text.querySelector(`[data-index="${from}"]`)?.scrollIntoView({ block: "nearest", behavior: "smooth" });
    return h("li", {}, h(`button.turn${mine ? ".mine" : ""}`, { onclick: go }, mine ? `turn ${(index + 1) / 2}` : "context", h("small", {}, plural(count, "token"))));
  });
  return h("ul.turns", {}, entries);
}
