// One request for a chat, or for more of a text, piece by piece. Calls back with every chunk; throws what the server says is wrong.
export async function stream(body, signal, onChunk) {
  const response = await fetch("messages" in body ? "/v1/chat/completions" : "/v1/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("the server cannot be reached; ask again when it runs");
  });
  if (!response.ok) throw new Error(await complaint(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  let whole = false;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a comment
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") {
        whole = true;
        continue;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      onChunk(chunk);
    }
  }
  if (!whole) throw new Error("the connection ended before the answer did");
}

async function complaint(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}
