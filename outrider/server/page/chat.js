// The chat box: a conversation with the model, streamed, with accepted drafts in a colour of their own.
const MOST_TOKENS = 1024;  // of an answer
const messages = remembered("messages", []);
const MOST_BYTES = 20 << 20;  // of an image's file
const images = [];  // data URLs of the images that go with the next message
let answering = null;  // the AbortController of the answer that streams in

class Answer {
  // An answer as it grows: its text, and which parts of the text were accepted drafts.
  constructor(text = "") { this.element = line("assistant", ""); this.text = text; this.drafts = []; this.asked = 0; this.draw(); }
  add(text, isDraft) {
    const from = this.text.length, last = this.drafts.at(-1);
    this.text += text;
    if (isDraft && text) { if (last?.[1] === from) last[1] = this.text.length; else this.drafts.push([from, this.text.length]); }
  }
  addChunk(choice) {
    const text = choice.delta?.content ?? "", tokens = (choice.logprobs?.content ?? []).map(t => t.token);
    const runs = choice.run_lengths ?? [];
    if (tokens.join("") !== text) this.add(text, runs.some(n => n > 1));
    else {
      let i = 0;
      for (const length of runs) for (let k = 0; k < length && i < tokens.length; k++, i++) this.add(tokens[i], k < length - 1);
      for (; i < tokens.length; i++) this.add(tokens[i], false);
    }
    this.asked ||= requestAnimationFrame(() => this.draw());
  }
  draw() {
    this.asked = 0;
    const box = $("talk"), isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
    this.element.replaceChildren(markdown(this.text, (parent, from, to) => this.put(parent, from, to)));
    this.element.classList.toggle("waiting", !this.text);
    if (isAtEnd) box.scrollTop = box.scrollHeight;
  }
  put(parent, from, to) {
    let at = from;
    for (const [start, end] of this.drafts) {
      if (end <= at) continue;
      if (start >= to) break;
      if (start > at) parent.append(this.text.slice(at, start));
      const part = document.createElement("span");
      at = Math.min(end, to); part.className = "draft"; part.textContent = this.text.slice(Math.max(start, from), at);
      parent.append(part);
    }
    if (at < to) parent.append(this.text.slice(at, to));
  }
}
function line(kind, text) {
  const element = document.createElement("div");
  element.className = kind; element.textContent = text; $("talk").append(element);
  $("talk").scrollTop = $("talk").scrollHeight;
  return element;
}
function userLine(content) {
  // A user's message: its images, then its text.
  const parts = typeof content === "string" ? [{type: "text", text: content}] : content;
  const element = line("user", parts.filter(p => p.type === "text").map(p => p.text).join("\n"));
  element.prepend(...parts.filter(p => p.type === "image_url").map(p => shownImage(p.image_url.url)));
  return element;
}
function shownImage(url) {
  const element = document.createElement("img");
  element.src = url; element.alt = "an image of the message";
  element.addEventListener("load", () => { $("talk").scrollTop = $("talk").scrollHeight; });
  return element;
}
function showImages() {
  $("images").hidden = !images.length;
  $("images").replaceChildren(...images.map((url, index) => {
    const button = document.createElement("button");
    button.type = "button"; button.title = "Leave this image out"; button.append(shownImage(url));
    button.addEventListener("click", () => { images.splice(index, 1); showImages(); });
    return button;
  }));
}
async function addImages(files) {
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    if (file.size > MOST_BYTES) { line("note", `${file.name} is larger than ${MOST_BYTES >> 20} MiB`); continue; }
    const reader = new FileReader();
    await new Promise((done, failed) => { reader.onload = done; reader.onerror = failed; reader.readAsDataURL(file); });
    images.push(reader.result);
  }
  showImages();
}
function usage(drafts, tokens, seconds) {
  let text = `${tokens} tokens, ${(tokens / seconds).toFixed(1)} a second`;
  if (drafts?.num_draft_tokens) text += `; ${drafts.num_accepted_draft_tokens} of ${drafts.num_draft_tokens} drafts accepted, ` +
    `${drafts.mean_acceptance_length.toFixed(2)} tokens a step`;
  return text;
}
async function refusal(answer) {
  try { return (await answer.json()).error.message; } catch (error) { return `the server answered with status ${answer.status}`; }
}
async function ask(said, signal) {
  const began = performance.now();
  let rest = "", note = "";
  const body = {messages, stream: true, max_tokens: MOST_TOKENS, temperature: 0.7, logprobs: true, return_run_lengths: true, stream_options: {include_usage: true}};
  const answer = await fetch("v1/chat/completions", {method: "POST", signal, body: JSON.stringify(body),
    headers: {...headers(), "Content-Type": "application/json"}});
  if (answer.status === 401) askForKey();
  if (!answer.ok) throw new Error(await refusal(answer));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const events = (rest + part.value).split("\n\n");
    rest = events.pop();
    for (const data of events.map(e => e.slice(6)).filter(d => d && d !== "[DONE]")) {
      const chunk = JSON.parse(data), choice = chunk.choices?.[0];
      if (chunk.error) throw new Error(chunk.error.message);
      if (choice) said.addChunk(choice);
      if (choice?.finish_reason === "length") note = "; cut off there: the most for one answer";
      if (chunk.usage) note = usage(chunk.metrics?.speculative_decoding, chunk.usage.completion_tokens, (performance.now() - began) / 1000) + note;
    }
  }
  return note;
}
async function send(text) {
  const urls = images.splice(0);
  const content = !urls.length ? text : [...urls.map(url => ({type: "image_url", image_url: {url}})), ...(text ? [{type: "text", text}] : [])];
  showImages();
  const said = (userLine(content), messages.push({role: "user", content}), new Answer());
  answering = new AbortController(); showButtons();
  let note = "", failed = false;
  try { note = await ask(said, answering.signal); }
  catch (error) {
    const isStopped = error.name === "AbortError", isLost = error instanceof TypeError;  // fetch has no better word for it
    note = isStopped ? "stopped" : isLost ? "the server does not answer" : error.message;
    if (!isStopped) failed = true;
  }
  cancelAnimationFrame(said.asked); said.draw(); said.element.classList.remove("waiting");
  if (said.text) messages.push({role: "assistant", content: said.text}); else messages.pop();
  line("note", note);
  if (failed && !said.text && !$("say").value && !images.length) {  // to be sent once more, or changed
    $("say").value = text; images.push(...urls); fit(); showImages();
  }
  answering = null; showButtons(); remember("messages", messages);
}
function showButtons() {
  $("send").hidden = $("send").disabled = answering !== null;
  $("stop").hidden = answering === null;
  $("fresh").hidden = answering !== null || !$("talk").hasChildNodes();
}
function fit() { const box = $("say"); box.style.height = "auto"; box.style.height = box.scrollHeight + 2 + "px"; }

document.querySelector("form").addEventListener("submit", event => {
  event.preventDefault();
  const text = $("say").value.trim();
  if ((!text && !images.length) || answering) return;
  $("say").value = ""; fit(); send(text);
});
$("say").addEventListener("input", fit);
$("say").addEventListener("paste", event => {
  const files = [...event.clipboardData.files].filter(file => file.type.startsWith("image/"));
  if (files.length) { event.preventDefault(); addImages(files); }
});
$("chat").addEventListener("dragover", event => { if (event.dataTransfer.types.includes("Files")) event.preventDefault(); });
$("chat").addEventListener("drop", event => { if (event.dataTransfer.files.length) { event.preventDefault(); addImages(event.dataTransfer.files); } });
$("say").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault(); document.querySelector("form").requestSubmit();
});
$("stop").addEventListener("click", () => answering?.abort());
$("fresh").addEventListener("click", () => { messages.length = 0; $("talk").replaceChildren(); remember("messages", messages); showButtons(); $("say").focus(); });
for (const {role, content} of messages) if (role === "user") userLine(content); else new Answer(content);
showButtons();
