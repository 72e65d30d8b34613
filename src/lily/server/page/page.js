// A conversation with the server that sent this page. Text is only ever set as text, never as markup.
const $ = (id) => document.getElementById(id);
let messages = [];
let running = null; // the AbortController of the answer that is being written

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function element(tag, className, text = "", parent = null) {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  parent?.append(made);
  return made;
}

function article(role, text = "") {
  const made = element("article", role, "", $("log"));
  made.setAttribute("aria-label", role === "user" ? "You" : "Lily");
  const body = element("div", "text", text, made);
  follow(true);
  return { made, body };
}

// Stay at the end while somebody reads there; leave them alone further up.
function follow(always = false) {
  const log = $("log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
}

function busy(controller) {
  running = controller;
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
}

// The data of each event, as it comes.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const blocks = held.split("\n\n");
    held = blocks.pop();
    for (const block of blocks) {
      for (const line of block.split("\n")) if (line.startsWith("data: ")) yield line.slice(6);
    }
  }
}

function request() {
  const system = $("system").value.trim();
  const body = {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true, include_progress: true },
    enable_thinking: $("thinking").checked,
  };
  if ($("temperature").value) body.temperature = Number($("temperature").value);
  if ($("limit").value) body.max_tokens = Number($("limit").value);
  return JSON.stringify(body);
}

class Answer {
  constructor() {
    const { made, body } = article("assistant");
    this.made = made;
    this.body = body;
    this.figures = element("div", "figures", "", made);
    this.content = "";
    this.reasoning = "";
    this.reason = null;
  }

  add(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.prompt_progress) this.figures.textContent = `reading ${chunk.prompt_progress.processed} of ${chunk.prompt_progress.total} tokens`;
    if (chunk.usage) this.count(chunk.usage, chunk.timing);
    for (const { delta, finish_reason } of chunk.choices ?? []) {
      if (delta.reasoning_content) this.think(delta.reasoning_content);
      if (delta.content) {
        this.content += delta.content;
        this.body.textContent = this.content;
      }
      this.reason = finish_reason ?? this.reason;
    }
    follow();
  }

  think(text) {
    if (!this.thoughts) {
      const fold = document.createElement("details");
      fold.className = "thoughts";
      element("summary", "", "Thoughts", fold);
      this.thoughts = element("div", "text", "", fold);
      this.made.prepend(fold);
    }
    this.reasoning += text;
    this.thoughts.textContent = this.reasoning;
  }

  count(usage, timing) {
    const reused = usage.prompt_tokens_details.cached_tokens;
    const cut = this.reason === "length" ? ", cut at the limit" : "";
    this.figures.textContent =
      `${usage.completion_tokens} tokens at ${timing.decode_tokens_per_second.toFixed(1)} tokens/s${cut}; ` +
      `prompt ${usage.prompt_tokens}, reused ${reused}`;
  }

  fail(error) {
    if (error.name === "AbortError") this.figures.textContent = "stopped";
    else element("div", "error", error.message, this.made).setAttribute("role", "alert");
  }

  message() {
    return { role: "assistant", content: this.content, ...(this.reasoning ? { reasoning_content: this.reasoning } : {}) };
  }
}

async function send() {
  const text = $("input").value.trim();
  if (!text || running) return;
  $("input").value = "";
  article("user", text);
  messages.push({ role: "user", content: text });
  const controller = new AbortController();
  busy(controller);
  const answer = new Answer();
  const own = messages;
  try {
    const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: request(), signal: controller.signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const data of events(response)) if (data !== "[DONE]") answer.add(JSON.parse(data));
  } catch (error) {
    answer.fail(error);
  }
  if (answer.content || answer.reason) own.push(answer.message());
  else own.pop(); // nothing came back: the next try begins from what stood before
  if (running === controller) busy(null);
  $("input").focus();
}

function anew() {
  running?.abort();
  busy(null);
  messages = [];
  $("log").replaceChildren();
  $("input").focus();
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.altKey && event.code === "KeyN") anew();
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", anew);

async function name() {
  const response = await fetch("health");
  if (response.ok) $("model").textContent = (await response.json()).model;
}
name();
