// Held-out prompts before and after training: a line for each, with the answer of the first evaluation and of the last.

async function drawHeldout(head) {
  const element = document.getElementById("heldout");
  const tables = [];
  for (const [index, run] of head.runs.entries()) {
    const packed = run.heldout ? await unpack(`heldout-${index}`) : null;
    if (packed) tables.push(heldoutTable(run, packed, head.runs.length > 1));
  }
  element.hidden = !tables.length;
  if (tables.length) section(element, "Held-out answers", "Greedy answers to prompts that are never trained on. `stretto samples RUN --held-out` shows them whole.", ...tables);
}

function heldoutTable(run, packed, named) {
  const steps = packed.steps;
  const values = packed.rows.flatMap((row) => row.answers.map((each) => each?.reward)).filter((value) => value !== null && value !== undefined);
  const scale = { low: Math.min(0, ...values), high: Math.max(...values, 1e-9) };
  const cell = (each) => each === null ? h("td.none", {}, "–")
    : h("td", {}, h("i.dot", { style: { background: rewardColour(each.reward, scale) }, title: each.failure ?? `reward ${short(each.reward)}` }), ` ${each.reward === null ? "–" : short(each.reward)} `, h("span.said", {}, each.text));
  const rows = packed.rows.map((row) => h("tr", {}, h("th", { title: row.prompt }, row.asked), h("td", {}, row.reference ?? ""), row.answers.map(cell)));
  const left = packed.left_out ? h("p.lead", {}, `${plural(packed.left_out, "prompt")} more did not fit into the page`) : null;
  return h("div.card.heldout", {}, named ? h("h3", {}, run.name) : null,
    h("table.heldout", {}, h("thead", {}, h("tr", {}, h("th", {}, "prompt"), h("th", {}, "reference"), steps.map((step) => h("th", {}, `step ${step}`)))), h("tbody", {}, rows)), left);
}
