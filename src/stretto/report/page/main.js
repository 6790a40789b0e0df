// Puts the page together, keeps what is open in its address, and looks for a newer page while a run goes on.

const REFRESH = 10_000;

const state = {
  run: 0, step: null, group: null, attempt: null, conversation: 0, channel: "advantage", theme: "auto", timeline: null,
  open(changes) {
    const before = this.run;
    Object.assign(this, changes);
    remember();
    drawAnswers(page.head, this, () => {}).then(() => (changes.step !== undefined ? glance("answers") : null));
    redrawCurves();
    if (this.run !== before) drawTimeline(page.head, this);
    else if (this.timeline && changes.step !== undefined) this.timeline.toStep(this.step);
  },
};
const page = { head: null };

/** Scrolls to a section that is out of sight. */
function glance(name) {
  const box = document.getElementById(name).getBoundingClientRect();
  if (box.top > window.innerHeight * 0.8 || box.bottom < 0) document.getElementById(name).scrollIntoView({ behavior: "smooth", block: "start" });
}

function remember() {
  const kept = ["run", "step", "group", "attempt", "channel", "theme"].filter((key) => state[key] !== null).map((key) => `${key}=${encodeURIComponent(state[key])}`);
  history.replaceState(null, "", `#${kept.join("&")}`);
}

function recall() {
  for (const [key, value] of new URLSearchParams(location.hash.slice(1))) {
    if (["run", "step", "group", "attempt"].includes(key) && /^\d+$/.test(value)) state[key] = Number(value);
    if (key === "channel" && value in CHANNELS) state.channel = value;
    if (key === "theme" && ["auto", "light", "dark"].includes(value)) state.theme = value;
  }
}

function applyTheme() {
  colours.clear();
  if (state.theme === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.setAttribute("data-theme", state.theme);
}

function repaint() {
  applyTheme();
  remember();
  redrawCurves();
  state.timeline?.draw();
  drawOverview(page.head);
  drawExplained(page.head);
  drawPlan(page.head);
  drawRecipes(page.head);
  drawHeldout(page.head);
  drawAnswers(page.head, state, () => {});
}

function drawFoot(head) {
  const goesOn = head.runs.some((run) => run.alive);
  const box = h("input", { type: "checkbox", id: "refresh", checked: goesOn });
  if (goesOn) setInterval(() => box.checked && document.visibilityState === "visible" && location.reload(), REFRESH);
  show(document.getElementById("foot"), goesOn ? h("label", {}, box, " load the page again every 10 s, while the run goes on") : null,
    h("span", {}, "One file, no server, nothing loaded from anywhere. Curves by uPlot (MIT)."));
}

async function main() {
  page.head = await unpack("head");
  recall();
  if (state.run >= page.head.runs.length) state.run = 0;
  applyTheme();
  drawTop(page.head, state, repaint);
  drawOverview(page.head);
  drawExplained(page.head);
  drawCurves(page.head, state);
  drawPlan(page.head);
  drawRecipes(page.head);
  drawFoot(page.head);
  await drawHeldout(page.head);
  await Promise.all([drawAnswers(page.head, state, () => {}), drawTimeline(page.head, state)]);
  redrawCurves();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  document.documentElement.dataset.drawn = "yes";
}

main();
