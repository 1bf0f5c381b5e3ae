// The operator's page. The token lives in `session` and nowhere else; whatever comes from the server is put in as text.
"use strict";

const at = (id) => document.getElementById(id);
const session = { token: "", operator: "", release: null, decision: null, stream: null, lastEvent: 0 };
const AGAIN_MS = 2000;
const PERCENT = 10000;
const SPLITS = ["running", "paused"];

const ACTIONS = {
  pause: { said: "Pause", states: ["running"], text: "The weight stays, no further step is taken." },
  resume: { said: "Resume", states: ["paused"], text: "The hold of the step begins again." },
  promote: { said: "Promote", states: ["running"], text: "The candidate release will serve everybody." },
  abort: { said: "Abort", states: ["draft", "running", "paused"], danger: true,
    text: "Nobody will see the candidate release any more." },
  rollback: { said: "Roll back", states: ["promoted"], danger: true, text: "The release before will serve everybody." },
};

class Refused extends Error {
  constructor(status, problem) {
    super([problem.title, problem.field, problem.detail].filter(Boolean).join(": ") || `Status ${status}`);
    this.status = status;
  }
}

function headers(more = {}) {
  return { authorization: `Bearer ${session.token}`, "x-operator": session.operator, ...more };
}

async function ask(path, options = {}) {
  const reply = await fetch(`/v1/releases${path}`, { ...options, headers: headers(options.headers), cache: "no-store" });
  const body = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Refused(reply.status, body);
  return body;
}

function key() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (b) => b.toString(16).padStart(2, "0")).join("");
}

// --- what is shown

function cells(...values) {
  const row = document.createElement("tr");
  values.forEach(([text, look], i) => {
    const cell = document.createElement(i ? "td" : "th");
    if (!i) cell.scope = "row";
    if (look) cell.className = look;
    cell.textContent = text;
    row.append(cell);
  });
  return row;
}

function say(id, text) {
  if (at(id).textContent !== text) at(id).textContent = text;
}

function tell(error) {
  at("problem").hidden = !error;
  say("problem", error ? error.message : "");
}

function number(value) {
  return value === null ? "-" : Number(value).toPrecision(3);
}

function showRelease(release) {
  const before = session.release;
  if (!release || !before || before.name !== release.name || before.version !== release.version) {
    // What was said about the release as it was.
    say("followed", "");
    say("why-answer", "");
  }
  session.release = release;
  at("split").hidden = !release;
  if (!release) {
    say("release-title", "No gray release");
    say("summary", "trirank release start DIRECTORY begins one.");
    at("actions").replaceChildren();
    return;
  }
  const share = release.weight_ppm / PERCENT;
  const step = release.plan.steps[release.step - 1];
  const shadow = step.shadow_ppm ? `; ${step.shadow_ppm / PERCENT} % in the shadow` : "";
  say("release-title", `${release.name}: ${release.state}`);
  const reason = release.reason ? ` Why: ${release.reason}` : "";
  say("summary", `Step ${release.step} of ${release.steps}${shadow}.${reason}`);
  const text = SPLITS.includes(release.state)
    ? `${share} % of the users have ${release.plan.candidate}, the others ${release.serving}.`
    : `${release.serving} serves everybody.`;
  say("split-text", text);
  at("split").setAttribute("aria-label", text);
  at("split-candidate").style.width = `${share}%`;
  showActions(release.state);
  showDecision();
}

function showActions(state) {
  for (const [action, { said, states, danger }] of Object.entries(ACTIONS)) {
    let button = at(`do-${action}`);
    if (!button) {
      button = document.createElement("button");
      button.id = `do-${action}`;
      button.type = "button";
      button.textContent = said;
      button.className = danger ? "danger" : "";
      button.addEventListener("click", () => confirmed(action));
      at("actions").append(button);
    }
    button.disabled = !states.includes(state);
  }
}

function showDecision() {
  const { release, decision } = session;
  if (!decision) return;
  const decides = SPLITS.includes(release.state);
  say("diagnosis", `${decides ? "" : `Before it was ${release.state}: `}${decision.verdict}: ${decision.sentence}`);
  at("diagnosis").className = decides ? decision.verdict : "quiet";
}

function showAnalysis(analysis) {
  session.decision = analysis.decision;
  showDecision();
  const { findings } = analysis.decision;
  at("gates").replaceChildren(...findings.map((f) => cells(
    [f.metric + (f.dry_run ? " (dry run)" : "")], [f.verdict, f.verdict],
    [number(f.candidate), "number"], [number(f.baseline), "number"], [f.sentence])));
}

function showChange(entry) {
  const when = new Date(entry.at_us / 1000);
  const row = cells([when.toLocaleString()], [entry.who], [entry.action],
    [`${entry.split.weight_ppm / PERCENT} %`, "number"], [entry.why]);
  at("history").prepend(row);
}

function clear() {
  session.lastEvent = 0;
  session.decision = null;
  at("history").replaceChildren();
  at("gates").replaceChildren();
  at("diagnosis").className = "";
  say("diagnosis", "No verdict yet");
}

// --- changes

async function confirmed(action) {
  const { said, text } = ACTIONS[action];
  const { name, version } = session.release;
  say("confirm-title", `${said} ${name}?`);
  say("confirm-text", text);
  say("confirm-yes", said);
  at("reason").value = "";
  at("confirm").returnValue = "no";
  at("confirm").onclose = async () => {
    if (at("confirm").returnValue !== "yes") return;
    try {
      const body = JSON.stringify({ why: at("reason").value });
      // The version that was on the screen when the button was pressed: somebody else's change since then is refused.
      const more = { "if-match": `"${version}"`, "idempotency-key": key(), "content-type": "application/json" };
      const release = await ask(`/${encodeURIComponent(name)}:${action}`, { method: "POST", body, headers: more });
      showRelease(release);
      const got = release.acknowledged;
      tell(null);
      if (got) say("followed", `${got.acked} of ${got.gateways} gateways followed within ${got.propagation_ms} ms.`);
    } catch (error) {
      tell(error);
    }
  };
  at("confirm").showModal();
}

async function whyUser(event) {
  event.preventDefault();
  try {
    const name = encodeURIComponent(session.release ? session.release.name : "");
    const user = encodeURIComponent(at("user").value);
    const found = await ask(`/${name}/assignment?user_id=${user}`);
    say("why-answer", `${found.user_id}: ${found.arm} (${found.release}), because of ${found.reason}; bucket `
      + `${found.bucket_ppm} of 1000000, the candidate release has those below ${found.weight_ppm}`);
  } catch (error) {
    say("why-answer", error.message);
  }
}

// --- the stream: server-sent events read with fetch, because EventSource cannot show a token

async function* events(name, stop) {
  const reply = await fetch(`/v1/releases/${encodeURIComponent(name)}/events`, {
    headers: headers({ accept: "text/event-stream", "last-event-id": String(session.lastEvent) }),
    signal: stop,
    cache: "no-store",
  });
  if (!reply.ok) throw new Refused(reply.status, await reply.json().catch(() => ({})));
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop();
      yield* parts.map(fieldsOf);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function fieldsOf(message) {
  return Object.fromEntries(message.split("\n").map((line) => {
    const colon = line.indexOf(": ");
    return [line.slice(0, colon), line.slice(colon + 2)];
  }));
}

async function follow(stop) {
  let name = null;
  while (!stop.aborted) {
    try {
      const [release = null] = (await ask("")).releases;
      showRelease(release);
      say("connection", "Connected");
      if (release && release.name !== name) {
        name = release.name;
        clear();
      }
      if (release) {
        for await (const { event, id, data } of events(name, stop)) {
          const told = JSON.parse(data);
          if (event === "change") {
            session.lastEvent = Number(id);
            showChange(told);
          } else {
            showAnalysis(told);
          }
          const [now = null] = (await ask("")).releases;
          if (!now || now.name !== name) break;
          showRelease(now);
        }
      }
    } catch (error) {
      if (stop.aborted) return;
      say("connection", "Connection lost; trying again");
      if (error.status === 401) return signOut(error);
    }
    await new Promise((done) => { setTimeout(done, AGAIN_MS); });
  }
}

function signOut(error) {
  session.token = "";
  at("console").hidden = true;
  at("sign-in").hidden = false;
  say("connection", "Not connected");
  tell(error);
  at("token").focus();
}

at("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  session.token = at("token").value.trim();
  session.operator = at("operator").value.replace(/[^\x20-\x7e]/g, "?");
  at("token").value = "";
  at("sign-in").hidden = true;
  at("console").hidden = false;
  tell(null);
  if (session.stream) session.stream.abort();
  session.stream = new AbortController();
  follow(session.stream.signal);
  at("main").focus();
});
at("why-user").addEventListener("submit", whyUser);
