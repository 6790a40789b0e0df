// The answers of a step: its groups, and the attempts of one side by side.

async function drawAnswers(head, state, redraw) {
  const element = document.getElementById("answers");
  const run = head.runs[state.run];
  if (!run || !run.answers.length) {
    return section(element, "Answers", "This page holds no answers: the run has none yet, or they are too long for it. `stretto samples` shows them.");
  }
  if (state.step === null) state.step = run.answers[run.answers.length - 1];
  const chosen = state.step;
  const packed = await unpack(`step-${state.run}-${chosen}`);
  if (state.step !== chosen) return undefined; // another was asked for meanwhile
  const title = `Answers of step ${chosen}${head.runs.length > 1 ? `, ${run.name}` : ""}`;
  const body = packed ? groupsOf(packed, run, state, redraw) : [missing(run, state)];
  return section(element, title, null, stepBar(run, state), kept(run), ...body);
}

function kept(run) {
  if (run.answers.length >= run.sampled) return null;
  return h("p.lead", {}, `The page holds the answers of ${run.answers.length.toLocaleString("en")} of ${run.sampled.toLocaleString("en")} steps, so that it stays below 3 MB.`);
}

function missing(run, state) {
  const nearest = [...run.answers].sort((one, other) => Math.abs(one - state.step) - Math.abs(other - state.step))[0];
  return h("div.card.missing", {}, h("p", {}, state.step === 0 ? "Step 0 is the evaluation before training; nothing was sampled to learn from. " : `The answers of step ${state.step} are not in this page. `),
    h("button", { onclick: () => state.open({ step: nearest, group: null, attempt: null }) }, `go to step ${nearest}`),
    state.step ? h("code.change", {}, `stretto report ${run.folder} --step ${state.step}`) : null);
}

function stepBar(run, state) {
  const place = run.answers.findIndex((step) => step >= state.step);
  const at = place < 0 ? run.answers.length - 1 : place;
  const go = (index) => run.answers[index] !== undefined && state.open({ step: run.answers[index], group: null, attempt: null });
  const slider = h("input", { type: "range", min: 0, max: run.answers.length - 1, value: at, "aria-label": "Step" });
  slider.addEventListener("change", () => go(Number(slider.value)));
  const row = run.metrics.step.indexOf(state.step);
  const numbers = [["reward", "reward/mean"], ["spread", "reward/std"], ["length", "length/mean"], ["cut off", "length/truncated"], ["dead groups", "groups/dead"], ["seconds", "seconds/step"], ["k3", "kl/engine_trainer"]]
    .filter(([, name]) => row >= 0 && run.metrics[name]?.[row] !== null && run.metrics[name]?.[row] !== undefined)
    .map(([name, metric]) => h("span", {}, `${name} `, h("b", {}, metric === "length/truncated" ? percent(run.metrics[metric][row]) : short(run.metrics[metric][row]))));
  return h("div.stepbar", {}, h("button", { onclick: () => go(at - 1), title: "The step before" }, "‹"), h("b.which", {}, `step ${state.step}`), h("button", { onclick: () => go(at + 1), title: "The next step" }, "›"), slider, h("div.numbers", {}, numbers));
}

function groupsOf(packed, run, state, redraw) {
  const groups = packed.groups;
  const index = Math.min(state.group ?? telling(groups), groups.length - 1);
  const values = groups.flatMap((group) => group.attempts.map((each) => each.reward?.value)).filter((value) => value !== null && value !== undefined);
  const scale = { low: Math.min(0, ...values), high: Math.max(...values, 1e-9) };
  const list = h("ol.groups", {}, groups.map((group, place) => groupLine(group, place, place === index, scale, state)));
  if (packed.left_out) list.append(h("li.lead", {}, `${plural(packed.left_out, "group")} more did not fit into the page`));
  const group = groups[index];
  const tokens = h("div.card.token-card");
  const chosen = group.attempts.find((each) => each.attempt === state.attempt) ?? group.attempts[0];
  drawTokens(tokens, chosen, state, () => drawTokens(tokens, chosen, state, redraw));
  return [h("div.step", {}, list, h("div.group", {}, question(group), h("div.attempts", {}, group.attempts.map((each) => attemptCard(each, group, run, scale, state, each === chosen))), tokens))];
}

/** The first group whose rewards differ, from which something can be learned; else the first. */
function telling(groups) {
  return Math.max(0, groups.findIndex((group) => new Set(group.attempts.map((each) => each.reward?.value)).size > 1));
}

function groupLine(group, place, on, scale, state) {
  const dots = group.attempts.map((each) => h("i.dot", { style: { background: rewardColour(each.reward?.value, scale) }, title: each.reward ? `reward ${short(each.reward.value)}` : each.failure }));
  return h("li", {}, h(`button.group-line${on ? ".on" : ""}`, { onclick: () => state.open({ group: place, attempt: null }) },
    h("span.prompt", {}, lastWords(group)), h("span.dots", {}, dots)));
}

function lastWords(group) {
  const messages = group.messages ?? [];
  const content = messages.length ? messages[messages.length - 1].content : group.prompt;
  return typeof content === "string" ? content.slice(0, 200) : JSON.stringify(content).slice(0, 200);
}

function rewardColour(value, { low, high }) {
  if (value === null || value === undefined) return "var(--idle)";
  const share = high > low ? (value - low) / (high - low) : 0;
  return `color-mix(in oklab, var(--good) ${Math.round(100 * share)}%, var(--bad))`;
}

function question(group) {
  const messages = (group.messages ?? []).map((message) => h("div.message", {}, h("span.role", {}, String(message.role ?? "")),
    h("span.content", {}, typeof message.content === "string" ? message.content : JSON.stringify(message.content))));
  const reference = group.reference === null || group.reference === undefined ? null
    : h("div.message", {}, h("span.role", {}, "reference"), h("span.content.reference", {}, typeof group.reference === "string" ? group.reference : JSON.stringify(group.reference)));
  return h("div.card.question", {}, h("h4", {}, `Prompt ${group.prompt}`, h("small", {}, `visit ${Number(group.visit) + 1} · ${group.environment ?? ""}`)), messages, reference);
}

function attemptCard(each, group, run, scale, state, on) {
  const reward = each.reward;
  const parts = Object.entries(reward?.parts ?? {}).map(([name, value]) => {
    const weight = run.weights[name] ?? 1;
    return h("div.part", {}, h("span", {}, `${short(weight)} × ${name}`), h("i", {}, h("i.bar", { style: { width: `${Math.max(0, Math.min(1, value)) * 100}%` } })), h("b", {}, short(value)));
  });
  const stop = each.conversations.some((talk) => talk.stop === "length") ? "cut off" : each.conversations[each.conversations.length - 1]?.stop;
  const card = h(`article.attempt${on ? ".on" : ""}`, { tabindex: 0, "data-attempt": each.attempt },
    h("header", {}, h("span.reward", { style: { color: rewardColour(reward?.value, scale) } }, reward ? short(reward.value) : "–"),
      h("span.which", {}, `attempt ${each.attempt}`), stop ? h(`span.tag${stop === "cut off" ? ".warn" : ""}`, {}, stop) : null, h(`span.tag${each.used ? ".used" : ".unused"}`, {}, each.used ? "trained on" : whyNot(each, group, run))),
    h("div.parts", {}, parts), each.failure ? h("p.failure", {}, each.failure) : null, h("div.said", {}, said(each)));
  const open = () => state.open({ attempt: each.attempt, conversation: 0 });
  card.addEventListener("click", open);
  card.addEventListener("keydown", (event) => event.key === "Enter" && open());
  return card;
}

function whyNot(each, group, run) {
  if (each.failure) return "not used: failed";
  const values = new Set(group.attempts.map((other) => other.reward?.value));
  return values.size === 1 && run.drops ? "not used: no contrast" : "not used";
}

/** What the model drew, turn by turn. */
function said(each) {
  const parts = each.conversations.flatMap((talk) => {
    const found = [];
    for (const token of tokensOf(talk)) {
      if (!token.trained) found.push(null);
      else if (found.length && found[found.length - 1] !== null) found[found.length - 1] += token.text;
      else found.push(token.text);
    }
    return found.filter((text) => text !== null);
  });
  return parts.length ? parts.map((text) => h("p", {}, text)) : [h("p.none", {}, each.answer ?? "nothing")];
}
