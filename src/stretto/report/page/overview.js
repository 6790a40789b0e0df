// The head of the page, what the run waits for, what was expected and what was measured, and recipes side by side.

function stateOf(run) {
  if (run.finished) return ["finished", `finished · ${plural(run.steps, "step")}`];
  if (run.alive) return ["running", `running · step ${run.steps} of ${run.planned_steps}`];
  return ["stopped", `stopped · step ${run.steps} of ${run.planned_steps}`];
}

function drawTop(head, state, redraw) {
  const names = head.runs.map((run, index) =>
    h("span.run", {}, head.runs.length > 1 ? swatch(lineInk(index)) : null, h("b", {}, run.name),
      h(`span.chip.${stateOf(run)[0]}`, {}, stateOf(run)[1])));
  const themes = ["auto", "light", "dark"];
  const theme = h("button.quiet", { id: "theme", title: "Colours: as the system has them, light, or dark" }, themeName(state));
  theme.addEventListener("click", () => {
    state.theme = themes[(themes.indexOf(state.theme) + 1) % themes.length];
    theme.textContent = themeName(state);
    redraw();
  });
  const time = new Date(head.made).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
  show(document.getElementById("top"), h("span.brand", {}, "stretto"), h("div.names", {}, names), h("span.made", {}, time), theme);
}

function themeName(state) {
  return { auto: "◐ auto", light: "○ light", dark: "● dark" }[state.theme];
}

function tile(label, value, ...notes) {
  return h("div.tile", {}, h("span.label", {}, label), h("span.value", {}, value),
    notes.filter(Boolean).map((note) => h("span.note", {}, note)));
}

function drawOverview(head) {
  const rows = head.runs.map((run, index) => h("div.tiles", {},
    head.runs.length > 1 ? h("h3.of", {}, swatch(lineInk(index)), run.name) : null, ...tiles(run)));
  show(document.getElementById("overview"), ...rows);
}

function tiles(run) {
  const metrics = run.metrics;
  const found = [];
  const accuracy = (metrics["eval/accuracy"] ?? []).map((value, row) => [value, row]).filter(([value]) => value !== null);
  if (accuracy.length) {
    const [[first], [now, row]] = [accuracy[0], accuracy[accuracy.length - 1]];
    const [low, high] = [metrics["eval/low"]?.[row], metrics["eval/high"]?.[row]];
    found.push(tile("held-out accuracy", short(now, 2), accuracy.length > 1 ? `from ${short(first, 2)} at step ${metrics.step[accuracy[0][1]]}` : null,
      low === undefined ? null : `95 % interval ${short(low, 2)} to ${short(high, 2)}`));
  }
  const heldout = (metrics["eval/reward"] ?? []).filter((value) => value !== null);
  if (heldout.length) found.push(tile("held-out reward", short(heldout[heldout.length - 1]), heldout.length > 1 ? `from ${short(heldout[0])} at first` : null));
  const rewards = (metrics["reward/mean"] ?? []).filter((value) => value !== null);
  if (rewards.length) found.push(tile("reward", short(rewards[rewards.length - 1]), `from ${short(rewards[0])} in the first step`));
  const corrected = run.plan.corrected;
  const [seconds, expected] = [median(metrics["seconds/step"]), corrected?.seconds.step ?? run.plan.predicted?.seconds?.step];
  if (seconds !== null) {
    found.push(tile("a step", duration(seconds), expected ? `${duration(expected)} predicted${corrected ? ` at step ${corrected.after}` : ""}` : "median", 
      metrics.idle ? `${percent(median(metrics.idle))} idle` : null));
  }
  found.push(costTile(run));
  const tokens = sum(metrics["tokens/generated"]);
  if (tokens) {
    const speed = tokens / sum(metrics["seconds/step"]);
    found.push(tile("tokens generated", tokens >= 1e6 ? `${short(tokens / 1e6)} M` : short(tokens), `${short(speed)} a second`));
  }
  return found.filter(Boolean);
}

function devicesOf(run) {
  return [...new Set((run.plan.cells ?? []).flatMap((cell) => cell.devices ?? []))];
}

function costTile(run) {
  const whole = run.plan.measured?.run?.seconds ?? sum(run.metrics["seconds/step"]) + sum(run.metrics["seconds/evaluate"]);
  if (!whole) return null;
  const devices = Math.max(1, devicesOf(run).length);
  const price = run.price_per_gpu_hour;
  if (price === null || price === undefined) {
    return tile("the run", duration(whole), `on ${plural(devices, "device")}`, "no price: placement.price_per_gpu_hour");
  }
  const step = median(run.metrics["seconds/step"]);
  const cost = (price * devices) / 3600;
  return tile("the run cost", short(cost * whole), `${short(cost * step)} a step, ${short(price)} a device and hour`, duration(whole));
}

// What a step waits for -------------------------------------------------------------------------------------------------

function drawExplained(head) {
  const told = head.runs.filter((run) => run.explained);
  const element = document.getElementById("explained");
  element.hidden = !told.length;
  if (!told.length) return;
  section(element, "What a step waits for", null, ...told.map((run) => explanation(run, told.length > 1)));
}

function explanation(run, named) {
  const { waits, findings, advice, healthy } = run.explained;
  const total = waits.reduce((seconds, each) => seconds + each.seconds, 0) || 1;
  const bar = h("div.stack", { role: "img", "aria-label": "Shares of a step" }, waits.map((each) =>
    h("span", { style: { width: `${(100 * each.seconds) / total}%`, background: `var(--${waitInk(each.stage)})` }, title: `${each.what}: ${duration(each.seconds)}` })));
  const keys = h("div.keys", {}, waits.map((each) =>
    h("span.key", {}, swatch(waitInk(each.stage)), `${each.what} `, h("b", {}, percent(each.seconds / total)), ` ${duration(each.seconds)}`)));
  return h("div.card.explanation", {}, named ? h("h3", {}, run.name) : null,
    waits.length ? [bar, keys] : null,
    h("ul.findings", {}, findings.map((each) => h(`li.${each.level}`, {}, each.text, each.fix ? h("span.fix", {}, each.fix) : null))),
    advice.length ? h("div.advice", {}, advice.map(adviceLine)) : null,
    healthy ? null : h("p.lead", {}, "What would make a step faster is said once the run is sound."));
}

function adviceLine(each) {
  return h("p", {}, `${each.what} `, h("span.gain", {}, each.gain), h("code.change", {}, each.change));
}

function waitInk(stage) {
  return stage === "nothing" ? "idle" : stageInk(stage);
}

// Predicted and measured ------------------------------------------------------------------------------------------------

function drawPlan(head) {
  const runs = head.runs.filter((run) => run.plan.cells);
  section(document.getElementById("plan"), "Predicted and measured",
    "What the planner expected of a step, beside the median of what steps took. Stages that overlap add up to more than the step.",
    h("div.row", {}, runs.map((run) => planTable(run, head.runs.length > 1))));
}

function measuredSeconds(run) {
  const steps = (run.metrics["seconds/step"] ?? []).map((value) => value !== null);
  const found = {};
  for (const [name, column] of Object.entries(run.metrics)) {
    if (!name.startsWith("seconds/") || name === "seconds/evaluate") continue;
    found[name.slice(8)] = median(column.map((value, row) => (steps[row] ? value ?? 0 : null)));
  }
  return found;
}

function planTable(run, named) {
  const predicted = run.plan.predicted ?? {};
  const measured = { seconds: measuredSeconds(run), ...(run.plan.measured ?? {}) };
  const step = measured.seconds.step || predicted.seconds?.step || 1;
  const stages = [...new Set([...STAGES, ...Object.keys(measured.seconds), "step"])].filter((stage) =>
    stage !== "step" && ((measured.seconds[stage] ?? 0) >= step / 200 || (predicted.seconds?.[stage] ?? 0) >= step / 200));
  const rows = [...stages, "step"].map((stage) => h("tr", { class: stage === "step" ? "total" : null },
    h("th", {}, stage === "step" ? null : swatch(stageInk(stage)), stage), 
    h("td", {}, duration(predicted.seconds?.[stage])), h("td", {}, duration(measured.seconds[stage])),
    h("td.bars", {}, pair(predicted.seconds?.[stage], measured.seconds[stage], step, stage))));
  const memory = [...new Set([...Object.keys(predicted.memory_gb ?? {}), ...Object.keys(measured.memory_gb ?? {})])];
  const peak = last(run.metrics["memory/peak_gb"]);
  const most = Math.max(...memory.map((device) => Math.max(predicted.memory_gb?.[device] ?? 0, measured.memory_gb?.[device] ?? 0)), 1e-9);
  rows.push(...memory.map((device) => h("tr", {}, h("th", {}, device), h("td", {}, gigabytes(predicted.memory_gb?.[device])),
    h("td", {}, gigabytes(measured.memory_gb?.[device])), h("td.bars", {}, pair(predicted.memory_gb?.[device], measured.memory_gb?.[device], most)))));
  if (!memory.length && peak !== null) rows.push(h("tr", {}, h("th", {}, "memory, most so far"), h("td", {}, "–"), h("td", {}, gigabytes(peak)), h("td")));
  for (const [label, key] of [["cost of a step", "cost_per_step"], ["tokens per trajectory", "answer_tokens"]]) {
    if (measured[key] || predicted[key]) rows.push(h("tr", {}, h("th", {}, label), h("td", {}, short(predicted[key])), h("td", {}, short(measured[key])), h("td")));
  }
  return h("div.card", {}, named ? h("h3", {}, run.name) : null,
    h("p.lead", {}, `${run.plan.strategy} on ${plural(Math.max(1, devicesOf(run).length), "device")}`, predicted.constants ? `; constants: ${predicted.constants}` : null),
    h("table.plan", {}, h("thead", {}, h("tr", {}, h("th"), h("th", {}, "predicted"), h("th", {}, "measured"), h("th"))), h("tbody", {}, rows)));
}

function pair(expected, seen, whole, stage) {
  const bar = (value, kind) => h(`i.${kind}`, { style: { width: `${Math.min(100, (100 * (value ?? 0)) / whole)}%`, background: `var(--${stage && stage !== "step" ? stageInk(stage) : "accent"})` } });
  return [bar(expected, "expected"), bar(seen, "seen")];
}

function gigabytes(value) {
  return value === null || value === undefined ? "–" : `${short(value)} GB`;
}

// Recipes ---------------------------------------------------------------------------------------------------------------

function drawRecipes(head) {
  const differing = Object.entries(head.differing);
  const names = head.runs.map((run, index) => h("th", {}, head.runs.length > 1 ? swatch(lineInk(index)) : null, run.name));
  const table = (rows) => h("table.recipe", {}, h("thead", {}, h("tr", {}, h("th", {}, "key"), names)),
    h("tbody", {}, rows.map(([key, values]) => h("tr", {}, h("th", {}, key), values.map((value) => h("td", {}, shownValue(value)))))));
  const keys = [...new Set(head.runs.flatMap((run) => Object.keys(run.recipe)))];
  const everything = h("details", {}, h("summary", {}, `every key (${keys.length})`),
    table(keys.map((key) => [key, head.runs.map((run) => run.recipe[key])])));
  const several = head.runs.length > 1;
  section(document.getElementById("recipes"), several ? "What differs in the recipes" : "Recipe", null,
    several ? (differing.length ? table(differing) : h("p.lead", {}, "Nothing: the recipes are equal.")) : null, everything);
}

function shownValue(value) {
  if (value === null || value === undefined) return h("span.none", {}, value === null ? "null" : "–");
  return typeof value === "string" ? value : JSON.stringify(value);
}
