// What worked when: a lane per cell on a canvas. The wheel zooms about the pointer, dragging moves, idle time is hatched.

const LANE = 30;
const [LEFT, TOP, RIGHT] = [130, 26, 78];

function drawTimeline(head, state) {
  const element = document.getElementById("timeline");
  const run = head.runs[state.run];
  return timelineOf(state.run).then((line) => {
    if (!line || !line.start.length) return section(element, "Timeline", "Nothing has worked yet.");
    const view = new TimelineView(line, run, state);
    state.timeline = view;
    const stages = h("div.keys", {}, line.stages.map((stage) => h("span.key", {}, swatch(stageInk(stage)), stage)), h("span.key", {}, h("i.swatch.hatched"), "idle"));
    const tools = h("div.tools", {}, h("button", { id: "zoom-out", title: "Zoom out", onclick: () => view.zoom(2) }, "−"), h("button", { id: "zoom-in", title: "Zoom in", onclick: () => view.zoom(0.5) }, "+"),
      h("button", { onclick: () => view.toStep(state.step ?? line.step[line.step.length - 1]) }, "this step"), h("button", { onclick: () => view.all() }, "whole run"));
    section(element, `Timeline${head.runs.length > 1 ? `, ${run.name}` : ""}`, "A lane for each cell. The wheel zooms, dragging moves, a click opens the step.",
      line.from_step ? h("p.lead", {}, `From step ${line.from_step} on; the earlier ones are left out, so that the page stays small.`) : null,
      h("div.timeline-head", {}, stages, tools), h("div.card.canvas", {}, view.canvas, view.tip));
    view.toStep(line.step[line.step.length - 1], 3);
    new ResizeObserver(() => view.draw()).observe(view.canvas);
    return undefined;
  });
}

class TimelineView {
  constructor(line, run, state) {
    this.line = line;
    this.state = state;
    this.end = line.start.reduce((most, start, index) => Math.max(most, start + line.length[index]), 0);
    this.from = 0;
    this.to = this.end;
    const cells = new Map((run.plan.cells ?? []).map((cell) => [cell.name, cell]));
    this.devices = line.cells.map((name) => (cells.get(name)?.devices ?? [name === "judges" ? "reward functions" : ""]).map((each) => each.replace("localhost/", "")).join(" "));
    this.lanes = line.cells.map((_, cell) => line.start.map((_start, index) => index).filter((index) => line.cell[index] === cell));
    this.bounds = boundsOf(line);
    this.canvas = h("canvas", { id: "lanes", tabindex: 0, style: { height: `${TOP + this.lanes.length * LANE + 6}px` } });
    this.tip = h("div.tip", { hidden: true });
    this.listen();
  }

  listen() {
    let pressed = null;
    this.canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.timeAt(event.offsetX));
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => {
      pressed = { x: event.offsetX, from: this.from, to: this.to, moved: false };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!pressed) return this.point(event);
      const more = ((pressed.x - event.offsetX) / this.width()) * (pressed.to - pressed.from);
      pressed.moved ||= Math.abs(pressed.x - event.offsetX) > 3;
      return this.look(pressed.from + more, pressed.to + more);
    });
    this.canvas.addEventListener("pointerup", (event) => {
      const found = pressed && !pressed.moved ? this.spanAt(event) : null;
      pressed = null;
      if (found !== null) this.state.open({ step: this.line.step[found], group: null, attempt: null });
    });
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("dblclick", () => this.all());
    this.canvas.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -0.2, ArrowRight: 0.2 }[event.key];
      if (move) this.look(this.from + move * (this.to - this.from), this.to + move * (this.to - this.from));
      if (event.key === "+") this.zoom(0.5);
      if (event.key === "-") this.zoom(2);
    });
  }

  width() {
    return Math.max(50, this.canvas.clientWidth - LEFT - RIGHT);
  }

  timeAt(x) {
    return this.from + ((x - LEFT) / this.width()) * (this.to - this.from);
  }

  x(time) {
    return LEFT + ((time - this.from) / (this.to - this.from)) * this.width();
  }

  look(from, to) {
    const span = Math.min(Math.max(to - from, 1e-3), this.end * 1.02);
    this.from = Math.min(Math.max(from, -0.01 * span), Math.max(0, this.end * 1.01 - span));
    this.to = this.from + span;
    this.draw();
  }

  zoom(factor, about = (this.from + this.to) / 2) {
    this.look(about - (about - this.from) * factor, about + (this.to - about) * factor);
  }

  all() {
    this.look(0, this.end);
  }

  /** So many steps up to this one. */
  toStep(step, count = 1) {
    const found = this.bounds.filter((each) => each.step <= step && each.step > step - count);
    if (!found.length) return this.all();
    const [from, to] = [found[0].from, Math.max(...found.map((each) => each.to))];
    return this.look(from - (to - from) * 0.02, to + (to - from) * 0.02);
  }

  spanAt(event) {
    const lane = Math.floor((event.offsetY - TOP) / LANE);
    const time = this.timeAt(event.offsetX);
    const slack = (2 * (this.to - this.from)) / this.width();
    return (this.lanes[lane] ?? []).findLast((index) => this.line.start[index] - slack <= time && time <= this.line.start[index] + this.line.length[index] + slack) ?? null;
  }

  point(event) {
    const found = this.spanAt(event);
    this.tip.hidden = found === null;
    this.canvas.style.cursor = found === null ? "grab" : "pointer";
    if (found === null) return;
    const { line } = this;
    show(this.tip, h("b", {}, line.stages[line.stage[found]]), ` step ${line.step[found]} · ${duration(line.length[found])}`, 
      line.tokens[found] ? ` · ${plural(line.tokens[found], "token")}` : "", line.groups[found] ? ` · ${plural(line.groups[found], "group")}` : "");
    this.tip.style.left = `${Math.min(event.offsetX + 12, this.canvas.clientWidth - 260)}px`;
    this.tip.style.top = `${event.offsetY + 14}px`;
  }

  draw() {
    const [wide, high, scale] = [this.canvas.clientWidth, this.canvas.clientHeight, window.devicePixelRatio || 1];
    if (!wide) return;
    this.canvas.width = wide * scale;
    this.canvas.height = high * scale;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    this.canvas.dataset.view = `${this.from.toFixed(4)},${this.to.toFixed(4)}`;
    const shares = this.lanes.map((lane, row) => this.drawLane(pen, lane, row, wide));
    this.canvas.dataset.busy = shares.map((share) => share.toFixed(3)).join(",");
    this.drawSteps(pen, wide, high);
    this.drawAxis(pen);
  }

  drawLane(pen, lane, row, wide) {
    const [top, { line }] = [TOP + row * LANE + 4, this];
    pen.fillStyle = hatch(pen);
    pen.fillRect(LEFT, top, this.width(), LANE - 8);
    let [busy, reached] = [0, this.from];
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, top, this.width(), LANE - 8);
    pen.clip();
    for (const index of lane) {
      const [start, stop] = [line.start[index], line.start[index] + line.length[index]];
      if (stop < this.from || start > this.to) continue;
      const [left, right] = [this.x(start), this.x(stop)];
      pen.fillStyle = colour(stageInk(line.stages[line.stage[index]]));
      pen.globalAlpha = line.step[index] === this.state.step || this.state.step === null ? 1 : 0.78;
      pen.fillRect(left, top, Math.max(0.6, right - left - (right - left > 4 ? 1 : 0)), LANE - 8);
      pen.globalAlpha = 1;
      if (Math.min(right, LEFT + this.width()) - Math.max(left, LEFT) > 64) {
        pen.fillStyle = colour("on-stage");
        pen.fillText(line.stages[line.stage[index]], Math.max(left, LEFT) + 7, top + (LANE - 8) / 2 + 1);
      }
      const [begun, ended] = [Math.max(start, reached), Math.min(stop, this.to)];
      busy += Math.max(0, ended - begun);
      reached = Math.max(reached, ended);
    }
    pen.restore();
    const share = busy / (this.to - this.from);
    pen.fillStyle = colour("text");
    pen.fillText(line.cells[row], 12, top + 6, LEFT - 20);
    pen.fillStyle = colour("muted");
    pen.font = "10px system-ui, sans-serif";
    pen.fillText(this.devices[row] ?? "", 12, top + 19, LEFT - 20);
    pen.font = "12px system-ui, sans-serif";
    pen.fillText(`${Math.round(100 * (1 - share))} % idle`, wide - RIGHT + 10, top + (LANE - 8) / 2);
    return share;
  }

  drawSteps(pen, wide, high) {
    let free = 0;
    for (const { step, from } of this.bounds) {
      const x = this.x(from);
      if (x < LEFT - 1 || x > wide - RIGHT || x < free - 34) continue;
      pen.fillStyle = colour("grid");
      pen.fillRect(x, TOP - 4, 1, high - TOP);
      if (x >= free) {
        pen.fillStyle = step === this.state.step ? colour("accent") : colour("muted");
        pen.fillText(`step ${step}`, x + 3, 8);
        free = x + 62;
      }
    }
  }

  drawAxis(pen) {
    const span = this.to - this.from;
    const unit = 10 ** Math.floor(Math.log10(span / 4));
    const gap = [1, 2, 5, 10].map((each) => each * unit).find((each) => span / each <= 8) ?? unit;
    pen.fillStyle = colour("faint");
    for (let time = Math.ceil(Math.max(0, this.from) / gap) * gap; time <= this.to; time += gap) {
      pen.fillText(duration(Number(time.toPrecision(8))), this.x(time) + 3, 20);
    }
  }
}

/** Step -> from when to when anything of it ran, in order. */
function boundsOf(line) {
  const found = new Map();
  line.start.forEach((start, index) => {
    const step = line.step[index];
    const known = found.get(step) ?? { step, from: start, to: start };
    known.from = Math.min(known.from, start);
    known.to = Math.max(known.to, start + line.length[index]);
    found.set(step, known);
  });
  return [...found.values()].sort((one, other) => one.from - other.from);
}

function hatch(pen) {
  const tile = document.createElement("canvas");
  [tile.width, tile.height] = [6, 6];
  const brush = tile.getContext("2d");
  brush.fillStyle = colour("lane");
  brush.fillRect(0, 0, 6, 6);
  brush.strokeStyle = colour("idle");
  brush.lineWidth = 1;
  brush.beginPath();
  brush.moveTo(-1, 7);
  brush.lineTo(7, -1);
  brush.stroke();
  return pen.createPattern(tile, "repeat");
}
