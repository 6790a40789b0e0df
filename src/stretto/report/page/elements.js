// Building blocks: elements whose text is only ever set as text, numbers as a reader wants them, and colours.

/** An element: h("p.note", {title: "…"}, "text", child, …). Strings become text, never markup; null is left out. */
function h(kind, attributes, ...children) {
  const [tag, ...classes] = kind.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, each]) => element.style.setProperty(key, each));
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Shows children in place of what an element had. */
function show(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

function section(element, title, lead, ...children) {
  return show(element, h("h2", {}, title), lead ? h("p.lead", {}, lead) : null, ...children);
}

/** A number with three digits, as short as it gets. */
function short(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6) return value.toExponential(1);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size < 1e-4) return value.toExponential(1).replace(".0e", "e").replaceAll("-", "−");
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

function percent(value) {
  return value === null || value === undefined ? "–" : `${Math.round(value * 1000) / 10} %`;
}

/** Seconds as people say them. */
function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${short(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function plural(count, word) {
  return `${Number(count).toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

const probe = h("i", { hidden: true });
const colours = new Map();

/** A colour of the style sheet, as the theme has it now: rgb(…). */
function colour(name) {
  if (!colours.has(name)) {
    if (!probe.isConnected) document.body.append(probe);
    probe.style.color = `var(--${name})`;
    colours.set(name, getComputedStyle(probe).color);
  }
  return colours.get(name);
}

/** The same with so much opacity. */
function faded(paint, share) {
  return paint.replace(/^rgba?\((\d+), (\d+), (\d+).*$/, `rgba($1, $2, $3, ${share})`);
}

const STAGES = ["generate", "reward", "reference", "value", "old", "train", "fit", "publish", "reduce", "evaluate", "checkpoint"];

/** Names of colours, for `swatch` and `colour`. */
function stageInk(stage) {
  return STAGES.includes(stage) ? `stage-${stage}` : "stage-other";
}

const LINES = 8;

function lineInk(index) {
  return `line-${(index % LINES) + 1}`;
}

/** A spot of a colour, which follows the theme by itself. */
function swatch(ink) {
  return h("i.swatch", { style: { background: `var(--${ink})` } });
}

/** The last value of a column that is a number. */
function last(column) {
  for (let index = (column ?? []).length - 1; index >= 0; index -= 1) {
    if (column[index] !== null) return column[index];
  }
  return null;
}

function median(column) {
  const numbers = (column ?? []).filter((value) => value !== null).sort((one, other) => one - other);
  if (!numbers.length) return null;
  const middle = numbers.length / 2;
  return numbers.length % 2 ? numbers[Math.floor(middle)] : (numbers[middle - 1] + numbers[middle]) / 2;
}

function sum(column) {
  return (column ?? []).reduce((total, value) => total + (value ?? 0), 0);
}
