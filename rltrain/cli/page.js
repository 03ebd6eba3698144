"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

function element(tag, parent, text, attributes) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const name in attributes || {}) made.setAttribute(name, attributes[name]);
  if (parent) parent.append(made);
  return made;
}

function drawing(tag, parent, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const name in attributes) made.setAttribute(name, attributes[name]);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

/* Numbers */

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toPrecision(12));
  return found;
}

function number(value, unit) {
  if (value === null || value === undefined) return "not finite";
  const size = Math.abs(value);
  const scales = unit === "bytes" ? [[2 ** 30, " GiB"], [2 ** 20, " MiB"], [2 ** 10, " KiB"]] : [[1e9, "G"], [1e6, "M"], [1e4, "k"]];
  for (const [at, name] of scales) if (size >= at) return +(value / (name === "k" ? 1e3 : at)).toPrecision(3) + name;
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return String(+value.toPrecision(size >= 1000 ? 5 : 3));
}

function duration(us) {
  if (us >= 60e6) return Math.floor(us / 60e6) + " min " + ((us % 60e6) / 1e6).toFixed(0) + " s";
  return us >= 1e6 ? (us / 1e6).toPrecision(3) + " s" : us >= 1e3 ? (us / 1e3).toPrecision(3) + " ms" : us.toPrecision(3) + " µs";
}

/* The tip at the pointer */

const tip = element("div", document.body, "", { id: "tip", hidden: "" });

function showTip(event, text) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  tip.style.left = clamp(event.clientX + 14, 4, innerWidth - box.width - 4) + "px";
  tip.style.top = (event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18) + "px";
}

/* Curves */

const LINES = ["--task6", "--task2", "--task8", "--task5", "--task3", "--task7", "--task0", "--move", "--task4", "--task1"];

/* A task has its colour of the timeline; where tasks of one panel share it, the later ones are dashed. */
function lineStyle(panel, i) {
  const colour = panel.series[i].colour;
  if (colour === null) return { stroke: `var(${LINES[i % LINES.length]})`, dash: "" };
  const before = panel.series.slice(0, i).filter((s) => s.colour === colour).length;
  return { stroke: `var(${colour})`, dash: ["", "6 3", "2 3", "8 2 2 2", "12 4"][before % 5] };
}

function drawPanel(figure, panel) {
  figure.querySelector("svg")?.remove();
  const width = figure.clientWidth - 28, height = 170, left = 60, bottom = 22, top = 10, right = 8;
  const svg = drawing("svg", figure, { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": panel.title });
  const xs = panel.series.flatMap((s) => s.x), ys = panel.series.flatMap((s) => s.y).filter((y) => y !== null);
  if (!ys.length) return drawing("text", svg, { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no finite value");
  const x0 = Math.min(...xs), x1 = Math.max(...xs), spread = Math.max(...ys) - Math.min(...ys) || Math.abs(ys[0]) || 1;
  const isBytes = panel.unit === "bytes", y0 = isBytes ? 0 : Math.min(...ys) - spread * 0.04, y1 = Math.max(...ys) + spread * 0.04;
  const scale = isBytes ? 1024 ** Math.floor(Math.log(Math.max(y1, 1)) / Math.log(1024)) : 1;
  const X = (x) => left + ((x - x0) / (x1 - x0 || 1)) * (width - left - right);
  const Y = (y) => height - bottom - ((y - y0) / (y1 - y0)) * (height - bottom - top);
  for (const y of ticks(y0 / scale, y1 / scale, 4).map((tick) => tick * scale)) {
    drawing("line", svg, { class: "grid", x1: left, x2: width - right, y1: Y(y), y2: Y(y) });
    drawing("text", svg, { x: left - 6, y: Y(y) + 4, "text-anchor": "end" }, number(y, panel.unit));
  }
  for (const x of ticks(x0, x1, Math.max(width / 90, 2)))
    if (panel.x !== "step" || Number.isInteger(x)) drawing("text", svg, { x: X(x), y: height - 6, "text-anchor": "middle" }, number(x) + (panel.x === "s" ? " s" : ""));
  panel.series.forEach((series, i) => {
    let path = "", pen = "M";
    series.x.forEach((x, j) => {
      if (series.y[j] === null) return (pen = "M");
      path += `${pen}${X(x).toFixed(1)} ${Y(series.y[j]).toFixed(1)}`;
      pen = "L";
    });
    const { stroke, dash } = lineStyle(panel, i), line = drawing("path", svg, { d: path });
    line.style.stroke = stroke;
    line.style.strokeDasharray = dash;
    if (series.x.length < 3) series.x.forEach((x, j) => series.y[j] !== null && (drawing("circle", svg, { cx: X(x), cy: Y(series.y[j]), r: 3 }).style.fill = stroke));
  });
  const cross = drawing("line", svg, { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" });
  svg.onpointermove = (event) => {
    const at = x0 + ((event.clientX - svg.getBoundingClientRect().left - left) / (width - left - right)) * (x1 - x0);
    const nearest = (series) => series.x.reduce((best, x, j) => (Math.abs(x - at) < Math.abs(series.x[best] - at) ? j : best), 0);
    const x = panel.series.map((s) => s.x[nearest(s)]).reduce((a, b) => (Math.abs(b - at) < Math.abs(a - at) ? b : a));
    const values = panel.series.filter((s) => s.x.includes(x)).map((s) => `${panel.series.length > 1 ? s.label + " " : ""}${number(s.y[s.x.indexOf(x)], panel.unit)}`);
    for (const end of ["x1", "x2"]) cross.setAttribute(end, X(x));
    cross.setAttribute("visibility", "visible");
    showTip(event, `${panel.x === "s" ? number(x) + " s" : "step " + x}\n${values.join("\n")}`);
  };
  svg.onpointerleave = () => { cross.setAttribute("visibility", "hidden"); showTip(null, ""); };
}

for (const figure of document.querySelectorAll("figure[data-panel]")) {
  const panel = data.panels[figure.dataset.panel];
  if (panel.series.length > 1) {
    const legend = element("ul", figure, "", { class: "legend" });
    panel.series.forEach((series, i) => {
      const item = element("li", legend);
      const { stroke, dash } = lineStyle(panel, i);
      element("i", item).style.background = dash ? `repeating-linear-gradient(90deg, ${stroke} 0 3px, transparent 3px 5px)` : stroke;
      item.append(`${series.label} ${number(series.y[series.y.length - 1], panel.unit)}`);
    });
  }
  let width = 0;
  new ResizeObserver(() => {
    if (figure.clientWidth === width) return;
    width = figure.clientWidth;
    drawPanel(figure, panel);
  }).observe(figure);
}

/* Timeline. A span is five numbers: start, duration (both in microseconds), name, kind, detail. */

function startTimeline(timeline) {
  const canvas = byId("spans"), axis = byId("axis"), TITLE = 18, GAP = 8, AXIS = 24;
  const height = (lane) => (lane.depth ? 11 : 19);
  let y = 0, view = [0, timeline.duration], hovered = null;
  for (const row of timeline.rows) {
    row.y = y;
    y += TITLE;
    for (const lane of row.lanes) {
      const tall = height(lane);
      lane.y = lane.shades ? y - tall - 2 : y;
      lane.tall = lane.shades ? Math.round(tall * 0.75) : tall;
      y = lane.y + tall + 2;
    }
    y += GAP;
  }
  const total = y;
  const width = () => canvas.clientWidth || 1;
  const toX = (us) => ((us - view[0]) / (view[1] - view[0])) * width();
  const toTime = (x) => view[0] + (x / width()) * (view[1] - view[0]);

  function look(start, end) {
    const length = clamp(end - start, Math.min(20, timeline.duration), timeline.duration);
    const from = clamp((start + end - length) / 2, 0, timeline.duration - length);
    view = [from, from + length];
    requestAnimationFrame(draw);
  }
  const zoom = (factor, at = (view[0] + view[1]) / 2) => look(at - (at - view[0]) * factor, at + (view[1] - at) * factor);
  const move = (share) => look(view[0] + share * (view[1] - view[0]), view[1] + share * (view[1] - view[0]));

  function context(target, tall) {
    const ratio = devicePixelRatio || 1;
    target.style.height = tall + "px";
    target.width = width() * ratio;
    target.height = tall * ratio;
    const pen = target.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    return pen;
  }

  function draw() {
    const colours = timeline.colours.map(cssColour), ink = cssColour("--ink"), soft = cssColour("--soft");
    const grid = cssColour("--grid"), onDark = cssColour("--on"), onPale = cssColour("--on-pale"), pale = timeline.colours.indexOf("--wait");
    const marks = ticks(view[0] / 1e6, view[1] / 1e6, Math.max(width() / 80, 2));
    const top = context(axis, AXIS), pen = context(canvas, total);
    top.fillStyle = soft;
    pen.fillStyle = grid;
    for (const mark of marks) {
      const x = toX(mark * 1e6), text = mark + " s";
      top.fillText(text, clamp(x - top.measureText(text).width / 2, 2, width() - top.measureText(text).width - 2), AXIS / 2);
      pen.fillRect(x, 0, 1, total);
    }
    for (const row of timeline.rows) {
      pen.fillStyle = ink;
      pen.fillText(row.label, 6, row.y + TITLE / 2 + 1);
      pen.fillStyle = soft;
      pen.fillText(row.roles, 14 + pen.measureText(row.label).width, row.y + TITLE / 2 + 1);
      row.lanes.forEach((lane, i) => drawLane(pen, lane, row.lanes[i + 1]?.shades ? row.lanes[i + 1].spans : [], colours, (colour) => (colour === pale ? onPale : onDark)));
    }
    if (hovered) {
      pen.strokeStyle = ink;
      pen.lineWidth = 1.5;
      pen.strokeRect(toX(hovered.start), hovered.lane.y, Math.max(toX(hovered.start + hovered.length) - toX(hovered.start), 2), hovered.lane.tall);
    }
    byId("window").textContent = `${duration(view[1] - view[0])} of ${duration(timeline.duration)}`;
  }

  /* The spans of a lane do not overlap, so their ends are in order too. */
  function firstEndingAfter(spans, time) {
    let low = 0, high = spans.length / 5;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans[middle * 5] + spans[middle * 5 + 1] < time) low = middle + 1;
      else high = middle;
    }
    return low * 5;
  }

  /* `shades` will be drawn over this lane. They are never drawn wider than they are, so that work stays to be seen. */
  function drawLane(pen, lane, shades, colours, textColour) {
    const spans = lane.spans, right = width(), least = lane.shades ? 0 : 0.7;
    let drawnTo = -1;
    for (let i = firstEndingAfter(spans, view[0]); i < spans.length && spans[i] < view[1]; i += 5) {
      const x = toX(spans[i]), end = toX(spans[i] + spans[i + 1]);
      if (end < drawnTo + 0.4) continue;
      const from = Math.max(x, 0), wide = Math.max(Math.min(end, right) - from, least);
      pen.fillStyle = colours[spans[i + 3]];
      pen.fillRect(from, lane.y, wide > 3 ? wide - 0.6 : wide, lane.tall);
      drawnTo = end;
      const shade = firstEndingAfter(shades, Math.max(spans[i], view[0]));
      const free = shade < shades.length ? Math.min(toX(shades[shade]) - from, wide) : wide;
      if (free > 34 && !lane.depth) {
        const text = timeline.names[spans[i + 2]], room = Math.floor((free - 8) / 6);
        pen.fillStyle = textColour(spans[i + 3]);
        if (room > 2) pen.fillText(pen.measureText(text).width < free - 8 ? text : text.slice(0, room - 1) + "…", from + 4, lane.y + lane.tall / 2 + 0.5);
      }
    }
  }

  function spanAt(event) {
    const box = canvas.getBoundingClientRect(), at = event.clientY - box.top, time = toTime(event.clientX - box.left);
    const slack = ((view[1] - view[0]) / width()) * 3;
    let found = null;
    for (const row of timeline.rows)
      for (const lane of row.lanes) {
        if (at < lane.y || at > lane.y + lane.tall) continue;
        for (let i = firstEndingAfter(lane.spans, time - slack); i < lane.spans.length && lane.spans[i] < time + slack; i += 5) {
          const start = lane.spans[i], length = lane.spans[i + 1], distance = Math.max(start - time, time - start - length, 0);
          if (found && distance > found.distance) continue;
          found = { distance, start, length, name: lane.spans[i + 2], detail: lane.spans[i + 4], lane, row };
        }
      }
    return found;
  }

  const describe = (span) => span && `${timeline.names[span.name]}  ${duration(span.length)}\n${timeline.details[span.detail]}\n${span.row.label} ${span.lane.label} at ${(span.start / 1e6).toFixed(3)} s`;
  function pick(event) {
    hovered = spanAt(event);
    if (hovered) byId("picked").textContent = describe(hovered).replaceAll("\n", " · ");
    draw();
  }

  const pointers = new Map();
  canvas.onpointerdown = (event) => { pointers.set(event.pointerId, event); canvas.setPointerCapture(event.pointerId); pick(event); };
  canvas.onpointerup = canvas.onpointercancel = (event) => pointers.delete(event.pointerId);
  canvas.onpointerleave = () => { hovered = null; showTip(null, ""); draw(); };
  canvas.onpointermove = (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) { pick(event); return showTip(event, describe(hovered)); }
    showTip(null, "");
    if (pointers.size === 1) move((before.clientX - event.clientX) / width());
    else {
      const other = [...pointers.values()].find((p) => p.pointerId !== event.pointerId);
      const apart = Math.abs(event.clientX - other.clientX), was = Math.abs(before.clientX - other.clientX);
      if (apart > 5 && was > 5) zoom(was / apart, toTime((event.clientX + other.clientX) / 2 - canvas.getBoundingClientRect().left));
    }
    pointers.set(event.pointerId, event);
  };
  canvas.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!event.ctrlKey && !event.metaKey && !sideways) return;
    event.preventDefault();
    if (sideways) move(event.deltaX / width());
    else zoom(Math.exp(clamp(event.deltaY, -60, 60) / 120), toTime(event.clientX - canvas.getBoundingClientRect().left));
  }, { passive: false });
  canvas.ondblclick = (event) => zoom(0.4, toTime(event.clientX - canvas.getBoundingClientRect().left));
  const actions = { in: () => zoom(0.5), out: () => zoom(2), left: () => move(-0.5), right: () => move(0.5), whole: () => look(0, timeline.duration) };
  for (const button of document.querySelectorAll("[data-do]")) button.onclick = actions[button.dataset.do];
  const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "whole" };
  canvas.onkeydown = (event) => { if (keys[event.key]) { event.preventDefault(); actions[keys[event.key]](); } };

  const show = (first, last) => {
    const steps = timeline.steps.filter((s) => s[0] >= first && s[0] <= last);
    if (!steps.length) return;
    const start = Math.min(...steps.map((s) => s[1])), end = Math.max(...steps.map((s) => s[2]));
    look(start - (end - start) * 0.03, end + (end - start) * 0.03);
  };
  const steps = timeline.steps.map((s) => s[0]), input = byId("step");
  if (steps.length) { input.min = steps[0]; input.max = steps[steps.length - 1]; } else input.disabled = true;
  input.oninput = () => input.value !== "" && show(+input.value, +input.value);
  if (steps.length > 12) {
    const middle = steps[Math.floor(steps.length / 2)];
    show(middle, middle + 3);
  }
  new ResizeObserver(() => requestAnimationFrame(draw)).observe(canvas.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

if (data.timeline) {
  for (const swatch of document.querySelectorAll("[data-colour]")) swatch.style.background = `var(${swatch.dataset.colour})`;
  startTimeline(data.timeline);
}

/* Samples: texts of the model and of the data, shown as text only. */

function startSamples(samples) {
  const cards = byId("cards"), stepOf = byId("sample_step"), order = byId("sample_order"), more = byId("more"), PAGE = 12;
  const steps = [...new Set(samples.map((s) => s.step))].sort((a, b) => a - b), reward = (s) => (typeof s.reward === "number" ? s.reward : -Infinity);
  element("option", stepOf, "all", { value: "" });
  for (const step of steps) element("option", stepOf, step, { value: step });
  if (steps.length) stepOf.value = steps[steps.length - 1];

  function card(sample) {
    const made = element("article", cards, undefined, { class: "card" }), top = element("div", made, undefined, { class: "top" });
    if (sample.reward !== undefined) element("span", top, "reward " + number(sample.reward), { class: "reward" });
    element("span", top, (sample.set === undefined ? "" : sample.set + ", ") + "step " + sample.step);
    if (sample.length !== undefined) element("span", top, sample.length + " tokens");
    const [low, high] = [sample.policy_version_min, sample.policy_version_max];
    if (low !== undefined) element("span", top, low === high || high === undefined ? "policy " + low : `policy ${low} to ${high}`);
    const said = sample.turns ?? [["response", sample.response]];
    const prompts = [["prompt", sample.prompt, sample.images], ["prompt as the model is shown it", sample.rendered_prompt]];
    for (const [who, text, images] of [...prompts, ...said, ["label", sample.label]]) {
      if (text === undefined) continue;
      element("h3", made, who);
      element("pre", made, text);
      const shown = images?.length ? element("div", made, undefined, { class: "images" }) : undefined;
      for (const image of images ?? []) element("img", shown, undefined, { src: image, alt: "image of the " + who });
    }
  }
  let shown = PAGE;
  function fill() {
    const chosen = samples.filter((s) => stepOf.value === "" || String(s.step) === stepOf.value);
    if (order.value !== "run") chosen.sort((a, b) => (order.value === "best" ? reward(b) - reward(a) : reward(a) - reward(b)) || 0);
    cards.replaceChildren();
    chosen.slice(0, shown).forEach(card);
    byId("sample_count").textContent = `${Math.min(shown, chosen.length)} of ${chosen.length}`;
    more.hidden = chosen.length <= shown;
  }
  stepOf.onchange = order.onchange = () => { shown = PAGE; fill(); };
  more.onclick = () => { shown += PAGE; fill(); };
  fill();
}

if (data.samples.length) startSamples(data.samples);
