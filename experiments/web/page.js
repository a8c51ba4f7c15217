"use strict";
const $ = (id) => document.getElementById(id);
const form = $("form"), FIELDS = ["network", "model", "training", "rank", "seq_len", "global_batch", "seconds"];
const NUMBERS = ["rank", "seq_len", "global_batch", "seconds"];
const START = [[["rtx_3090", 1], ["rtx_4090", 1]]];
let running = null;

function make(tag, values = {}, ...children) {
  const element = Object.assign(document.createElement(tag), values);
  element.append(...children);
  return element;
}

// ---------------------------------------------------------------- the form, which the address keeps

function addCard(pc, name = "", number = 1) {
  const row = make("div", { className: "card" },
    make("input", { type: "number", min: 1, max: 64, value: number, required: true, ariaLabel: "number of cards" }),
    make("input", { value: name, required: true, maxLength: 80, ariaLabel: "card", placeholder: "4090" }),
    make("button", { type: "button", textContent: "✕", ariaLabel: "remove the card", onclick: () => {
      row.remove();
      if (!pc.querySelector(".card")) pc.remove();
      changed();
    } }));
  row.children[1].setAttribute("list", "cards");
  pc.querySelector(".cards").append(row);
  return row;
}

function addPc(cards) {
  const pc = make("div", { className: "pc" });
  pc.append(
    make("div", { className: "name" }, make("span"),
      make("button", { type: "button", textContent: "+ card", onclick: () => {
        addCard(pc).children[1].focus();
        changed();
      } })),
    make("div", { className: "cards" }));
  for (const [name, number] of cards) addCard(pc, name, number);
  $("pcs").append(pc);
}

function pcsOf() {
  return [...document.querySelectorAll(".pc")].map((pc) =>
    [...pc.querySelectorAll(".card")].map((row) => [row.children[1].value.trim(), Number(row.children[0].value)]));
}

function changed() {
  const pcs = [...document.querySelectorAll(".pc")];
  pcs.forEach((pc, k) => { pc.querySelector("span").textContent = pcs.length > 1 ? `PC ${k + 1}` : "One PC"; });
  $("link").hidden = pcs.length < 2;
  form.elements.rank.disabled = form.elements.training.value === "full";
  const state = new URLSearchParams({ pcs: pcsOf().map((pc) => pc.map((card) => card.join("*")).join("+")).join(",") });
  for (const name of FIELDS) state.set(name, form.elements[name].value);
  history.replaceState(null, "", `/#${state}`);
}

function fill(values) {
  for (const name of FIELDS) if (values[name] !== undefined) form.elements[name].value = values[name];
  if (values.pcs) {
    $("pcs").replaceChildren();
    values.pcs.forEach(addPc);
  }
  changed();
}

function fromAddress() {
  const state = new URLSearchParams(location.hash.slice(1)), values = Object.fromEntries(state);
  const pcs = (state.get("pcs") || "").split(",").filter(Boolean).slice(0, 16).map((pc) =>
    pc.split("+").slice(0, 64).map((card) => [card.split("*")[0], Number(card.split("*")[1]) || 1]));
  fill({ ...values, pcs: pcs.length ? pcs : START });
}

// ---------------------------------------------------------------- an answer

function clear() {
  for (const id of ["cures", "lines", "bars", "table", "files", "typed", "report"]) $(id).replaceChildren();
  $("commands").hidden = true;
}

function tell(verdict, reason = "", bad = false) {
  $("verdict").className = bad ? "no" : "";
  $("verdict").textContent = verdict;
  $("reason").textContent = reason;
}

function bar(stage) {
  const track = make("span", { className: "track" });
  for (const part of stage.parts) {
    const piece = make("i", { title: part.label });
    piece.style.width = `${100 * part.share}%`;
    piece.style.background = part.colour;
    track.append(piece);
  }
  track.setAttribute("role", "img");
  track.setAttribute("aria-label", stage.parts.map((part) => part.label).join(", "));
  return make("div", { className: "bar" },
    make("span", { textContent: `${stage.name}, ${stage.layers}` }), track, make("span", { textContent: stage.of }));
}

function legend(bars) {
  const colours = new Map();
  for (const stage of bars) for (const part of stage.parts) colours.set(part.label.replace(/ [\d.]+ GiB$/, ""), part.colour);
  const list = make("div", { className: "legend" });
  for (const [label, colour] of colours) {
    const swatch = make("i");
    swatch.style.background = colour;
    list.append(make("span", {}, swatch, label));
  }
  return list;
}

function show(answer, key) {
  if (answer.refused) return tell("That cannot be planned", answer.refused, true);
  if (answer.task === "table") {
    tell("", "");
    const row = (cells, tag) => make("tr", {}, ...cells.map((cell) => make(tag, { textContent: cell })));
    $("table").append(make("table", {}, row(answer.head, "th"), ...answer.rows.map((cells) => row(cells, "td"))));
    return undefined;
  }
  tell(answer.verdict, answer.reason, !answer.fits);
  for (const [label, text] of answer.lines) $("lines").append(make("dt", { textContent: label }), make("dd", { textContent: text }));
  $("cures").append(...answer.cures.map((cure) => make("button", { type: "button", textContent: `Try ${cure.text}`,
    onclick: () => { fill(cure.form); ask("plan"); } })));
  $("typed").append(...answer.commands.map((text) => make("code", { textContent: text })));
  $("commands").hidden = false;
  if (!answer.fits) return undefined;
  $("bars").append(...answer.bars.map(bar), legend(answer.bars));
  $("files").append(...answer.files.map((name) => make("a", { href: `/file/${key}/${name}?download`, download: name, textContent: name })));
  const frame = make("iframe", { title: "the plan", src: `/file/${key}/report.html` });
  frame.setAttribute("sandbox", "allow-scripts");
  $("report").append(frame);
  return undefined;
}

async function read(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "", key = "", ended = false;
  for (;;) {
    const { value, done } = await reader.read();
    const lines = (left + (value || "")).split("\n");
    left = lines.pop();
    for (const line of lines.filter(Boolean)) {
      const news = JSON.parse(line);
      if (news.key) key = news.key;
      if (news.progress) tell("Searching …", news.progress);
      if (news.done) { ended = true; show(news, key); }
    }
    if (done) break;
  }
  if (!ended) tell("The search ended", "without an answer; is the program still running?", true);
}

async function ask(task) {
  if (running || !form.reportValidity()) return;
  const question = { task, pcs: pcsOf() };
  for (const name of FIELDS) question[name] = NUMBERS.includes(name) ? Number(form.elements[name].value) : form.elements[name].value.trim();
  running = new AbortController();
  busy(true);
  clear();
  tell("Searching …");
  try {
    const response = await fetch("/search", { method: "POST", signal: running.signal,
      headers: { "content-type": "application/json" }, body: JSON.stringify(question) });
    if (response.ok) await read(response);
    else tell("That cannot be asked", await response.text(), true);
  } catch (error) {
    if (error.name === "AbortError") tell("Stopped");
    else tell("The program does not answer", "start hexiopt page again, and open the address that it prints", true);
  } finally {
    running = null;
    busy(false);
  }
}

function busy(on) {
  for (const id of ["go", "next"]) $(id).disabled = on;
  $("stop").hidden = !on;
  if (on && document.activeElement === document.body) $("stop").focus();
}

form.addEventListener("submit", (event) => { event.preventDefault(); ask("plan"); });
form.addEventListener("input", changed);
$("more").onclick = () => { addPc([["rtx_4090", 1]]); changed(); };
$("next").onclick = () => ask("next");
$("stop").onclick = () => running && running.abort();
window.addEventListener("hashchange", fromAddress);
fromAddress();
