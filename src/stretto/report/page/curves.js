// Curves over steps: what each is, what is normal, and what to do otherwise. A click on a point opens its step.

const CURVES = [
  {
    title: "Held-out accuracy", lines: ["eval/accuracy"], band: ["eval/low", "eval/high"], range: [0, 1],
    normal: "Greedy answers to prompts that are never trained on, with the 95 % interval. Rises; nothing is shown yet while the interval holds the start.",
    otherwise: "Flat while the reward rises: read the answers, the reward may be earned in a wrong way.",
  },
  {
    title: "Reward and its parts", lines: ["reward/mean", "reward/outcome"], prefix: "reward/part/",
    normal: "Noisy, and rising. Parts are drawn without their weights.",
    otherwise: "A part that rises while the one you care about falls is being exploited: lower its weight. Flat from the start: see the groups without contrast.",
  },
  {
    title: "Held-out reward and its parts", lines: ["eval/reward"], prefix: "eval/reward/part/",
    normal: "Mean reward of greedy answers to prompts that are never trained on; parts without their weights. Rises.",
    otherwise: "The reward of training rises and this one does not: the run learns its prompts by heart.",
  },
  {
    title: "Groups without contrast", lines: ["groups/dead", "groups/used", "groups/infra"],
    normal: "Dead groups, all right or all wrong, teach nothing where an algorithm compares the answers to a prompt; others have none. Many at the start and at the end, fewer in between.",
    otherwise: "Dead in most groups: other prompts, or more samples of each. Anything in infra is a failure of the machine, not of the model.",
  },
  {
    title: "Answer length", lines: ["length/mean"],
    normal: "Tokens of an answer. Settles at what the task needs.",
    otherwise: "Climbing without an end while the reward rises with it: length is what is rewarded.",
  },
  {
    title: "Answers cut off", lines: ["length/truncated"], range: [0, 1],
    normal: "The share that the token limit ended. Near 0.",
    otherwise: "A truncated answer is judged wrong because it is unfinished: raise engine.max_new_tokens, or what the environment asks for where that is less.",
  },
  {
    title: "Entropy", lines: ["entropy"],
    normal: "Of the distributions that tokens were drawn from, in nats. Falls slowly.",
    otherwise: "Near 0 all answers are alike and learning ends: lower optimizer.lr, or add algorithm.kl.coef.",
  },
  {
    title: "KL to the reference", lines: ["kl/reference"],
    normal: "How far the policy has moved. Starts at 0 and grows slowly.",
    otherwise: "Jumping: the learning rate is too high for this reward.",
  },
  {
    title: "Engine against trainer", lines: ["kl/engine_trainer", "engine_trainer/largest"], log: true,
    normal: "Difference of the log-probabilities of the same tokens under the same weights. Below 1e-9 in float32; larger in bfloat16, but steady.",
    otherwise: "Growing: the engine rounds otherwise than the trainer; guards.max_k3 stops the run before it matters.",
  },
  {
    title: "Gradient norm", lines: ["grad_norm"],
    normal: "Before clipping. Steady.",
    otherwise: "Jumps by a factor of ten: lower optimizer.lr. 0: no group taught anything.",
  },
  {
    title: "Held back", lines: ["clip/share", "correction/share"],
    normal: "Share of tokens that the clip range or the correction cut. 0 with one update on policy, a few percent otherwise.",
    otherwise: "Much more: fewer batch.updates, or a lower rate.",
  },
  {
    title: "V* and the gap", lines: ["astar/gap", "astar/residual"],
    normal: "How much better than the reference answers are, and what of it is fitted. Both rise.",
    otherwise: "The residual stays at 0: raise optimizer.lr or beta2.",
  },
  {
    title: "Seconds of a step", lines: ["seconds/step"], stages: true,
    normal: "Mostly generate and train. Stages that overlap add up to more than the step.",
    otherwise: "One stage in front of all: see what a step waits for, above.",
  },
];

const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap((tens) => [1, 2, 5].map((each) => each * 10 ** tens));
const plots = [];

function drawCurves(head, state) {
  plots.splice(0).forEach((plot) => plot.destroy());
  const steps = [...new Set(head.runs.flatMap((run) => run.metrics.step ?? []))].sort((one, other) => one - other);
  const element = document.getElementById("curves");
  if (steps.length < 1) return section(element, "Curves", "No step has ended yet.");
  const cards = CURVES.map((curve) => [curve, seriesOf(curve, head)]).filter(([, series]) => series.length);
  const grid = h("div.grid");
  section(element, "Curves", "Click a point to read the answers of its step. Drag to zoom, double-click to go back.", grid);
  const answered = new Set(head.runs.flatMap((run) => run.answers));
  for (const [curve, series] of cards) {
    const [legend, place] = [h("div.legend"), h("div.plot")];
    grid.append(h("article.card.curve", {}, h("h3", {}, curve.title), legend, place,
      h("p.normal", {}, curve.normal), h("p.otherwise", {}, curve.otherwise)));
    plots.push(plotOf(curve, series, steps, { place, legend, answered, state }));
  }
  return undefined;
}

/** What a card draws: {name, run, ink, values by step}. */
function seriesOf(curve, head) {
  const several = head.runs.length > 1;
  return head.runs.flatMap((run, index) => {
    const stages = curve.stages ? STAGES.filter((stage) => stage !== "evaluate").map((stage) => `seconds/${stage}`) : [];
    const names = [...curve.lines, ...Object.keys(run.metrics).filter((name) => curve.prefix && name.startsWith(curve.prefix)), ...stages];
    const there = names.filter((name) => (run.metrics[name] ?? []).some((value) => value !== null));
    const shown = several && curve.stages ? there.filter((name) => name === "seconds/step") : there;
    return shown.map((name, place) => ({
      name: label(name), metric: name, run: index, main: place === 0, several, there: shown.length,
      ink: several ? lineInk(index) : curve.stages && place ? stageInk(name.slice(8)) : lineInk(place),
      dash: several && place ? [4, 3 + place] : null,
      values: byStep(run, name), low: place === 0 && curve.band ? byStep(run, curve.band[0]) : null, high: place === 0 && curve.band ? byStep(run, curve.band[1]) : null,
    }));
  });
}

const LABELS = { "clip/share": "clipped", "correction/share": "corrected", "kl/engine_trainer": "mean k3", "engine_trainer/largest": "largest difference", "kl/reference": "k3" };

function label(name) {
  return LABELS[name] ?? name.replace(/^(eval\/)?reward\/part\//, "").replace("seconds/", "").replace(/^(eval|reward|groups|length|astar)\//, "");
}

function byStep(run, name) {
  const column = run.metrics[name] ?? [];
  return new Map(run.metrics.step.map((step, row) => [step, column[row] ?? null]));
}

function plotOf(curve, series, steps, { place, legend, answered, state }) {
  const positive = (value) => (curve.log && value !== null && value <= 0 ? null : value);
  const columnOf = (values) => steps.map((step) => positive(values.get(step) ?? null));
  const [data, lines, bands] = [[steps], [{}], []];
  for (const each of series) {
    if (each.low) {
      const faint = () => faded(colour(each.ink), 0.16);
      data.push(columnOf(each.high), columnOf(each.low));
      lines.push({ width: 0, points: { show: false }, spanGaps: true, edge: true }, { width: 0, points: { show: false }, spanGaps: true, edge: true });
      bands.push({ series: [data.length - 2, data.length - 1], fill: faint });
    }
    data.push(columnOf(each.values));
    const few = data[data.length - 1].filter((value) => value !== null).length <= 60;
    lines.push({ label: each.name, stroke: () => colour(each.ink), width: each.main || each.several ? 2 : 1.5, dash: each.dash, spanGaps: true,
      points: { show: few, size: 5, stroke: () => colour(each.ink), fill: () => colour(each.ink) }, of: each });
  }
  const options = {
    width: 360, height: 190, series: lines, bands, legend: { show: false }, padding: [10, 10, 0, 0],
    scales: { x: { time: false, range: (plot, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: scaleOf(curve) },
    axes: [axis({ space: 60, size: 28, incrs: WHOLE }), axis({ size: 48, ...(curve.log ? { splits: decades } : {}), values: (plot, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))) })],
    cursor: { sync: { key: "steps", setSeries: false }, points: { size: 7 }, y: false },
    hooks: { setCursor: [(plot) => tell(plot, legend, steps)], draw: [(plot) => markStep(plot, state, steps)] },
  };
  const plot = new uPlot(options, data, place);
  tell(plot, legend, steps);
  choose(plot, steps, series, answered, state);
  new ResizeObserver(([entry]) => entry.contentRect.width > 40 && plot.setSize({ width: Math.floor(entry.contentRect.width), height: 190 })).observe(place);
  return plot;
}

function scaleOf(curve) {
  if (curve.range) return { range: [curve.range[0] - 0.02, curve.range[1] + 0.02] };
  if (curve.log) return { distr: 3 };
  return { range: (plot, low, high) => {
    if (low === null || high === null) return [0, 1];
    const margin = (high - low || Math.abs(high) || 1) * 0.1;
    return [low >= 0 && low <= (high - low) * 2 ? 0 : low - margin, high + margin];
  } };
}

/** Powers of ten between two values, few enough to be read. */
function decades(plot, axis, low, high) {
  const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const gap = Math.max(1, Math.ceil((to - from) / 5));
  return Array.from({ length: Math.floor((to - from) / gap) + 1 }, (_, index) => 10 ** (from + index * gap));
}

function axis(more) {
  return { stroke: () => colour("muted"), font: "11px system-ui, sans-serif", ticks: { show: false },
    grid: { stroke: () => colour("grid"), width: 1 }, gap: 6, ...more };
}

/** The values at the cursor, or the newest. */
function tell(plot, legend, steps) {
  const at = plot.cursor?.idx;
  const here = at !== null && at !== undefined && plot.cursor.left >= 0;
  const entries = plot.series.map((line, index) => [line.of, plot.data[index]]).filter(([of]) => of).map(([of, column]) => {
    const value = here ? column[at] : last(column);
    return h("span.entry", {}, swatch(of.ink), of.there > 1 || !of.several ? `${of.name} ` : "", h("b", {}, short(value)));
  });
  show(legend, entries, h("span.at", {}, here ? `step ${steps[at]}` : ""));
}

/** A vertical line at the step whose answers are open. */
function markStep(plot, state, steps) {
  if (state.step === null || state.step < steps[0]) return;
  const left = Math.round(plot.valToPos(state.step, "x", true));
  if (left < plot.bbox.left || left > plot.bbox.left + plot.bbox.width) return;
  plot.ctx.save();
  plot.ctx.strokeStyle = colour("accent");
  plot.ctx.setLineDash([3, 3]);
  plot.ctx.beginPath();
  plot.ctx.moveTo(left, plot.bbox.top);
  plot.ctx.lineTo(left, plot.bbox.top + plot.bbox.height);
  plot.ctx.stroke();
  plot.ctx.restore();
}

/** A click that was no drag opens the step below it, of the run whose line is nearest. */
function choose(plot, steps, series, answered, state) {
  let pressed = null;
  plot.over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
  plot.over.addEventListener("click", (event) => {
    if (pressed !== null && Math.abs(event.clientX - pressed) > 4) return;
    const box = plot.over.getBoundingClientRect();
    const index = plot.posToIdx(event.clientX - box.left);
    const wanted = plot.posToVal(event.clientY - box.top, "y");
    const lines = plot.series.map((line, place) => [line.of, plot.data[place][index]]).filter(([of, value]) => of && value !== null && value !== undefined);
    lines.sort(([, one], [, other]) => Math.abs(one - wanted) - Math.abs(other - wanted));
    state.open({ run: lines.length ? lines[0][0].run : series[0].run, step: steps[index], group: null, attempt: null });
  });
}

function redrawCurves() {
  plots.forEach((plot) => plot.redraw());
}
