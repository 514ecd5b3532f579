// TensorBoard's tab: the runs, and beside them the page of the one that is chosen, or of several side by side.
export async function render() {
  const style = document.createElement("style");
  style.textContent = `
    html, body { height: 100%; margin: 0; }
    body { display: flex; font: 14px/1.4 Roboto, system-ui, sans-serif; color: #212121; background: #fff; }
    nav { flex: 0 0 260px; overflow: auto; padding: 12px; border-right: 1px solid #ddd; box-sizing: border-box; }
    nav p { margin: 0 0 10px; color: #555; font-size: 12.5px; }
    nav label { display: flex; gap: 8px; padding: 4px 2px; cursor: pointer; overflow-wrap: anywhere; }
    nav small { display: block; color: #555; }
    iframe { flex: 1; border: 0; min-width: 0; }
    @media (max-width: 700px) { body { flex-direction: column; } nav { flex: 0 0 30%; border-right: 0; border-bottom: 1px solid #ddd; } }
  `;
  document.head.append(style);
  const nav = document.createElement("nav");
  const frame = document.createElement("iframe");
  frame.title = "The page of the run";
  document.body.append(nav, frame);
  const hint = document.createElement("p");
  nav.append(hint);

  const answer = await fetch("./runs");
  const runs = answer.ok ? await answer.json() : [];
  hint.textContent = runs.length ? "Choose a run, or several to have them side by side." : "There is no run yet.";
  const boxes = runs.map(({ run, state, step, steps }, number) => {
    const label = document.createElement("label");
    const box = document.createElement("input");
    box.type = "checkbox";
    box.value = run;
    box.checked = number === 0;
    const words = document.createElement("span");
    words.textContent = run;
    const more = document.createElement("small");
    more.textContent = [state, step === null || step === undefined ? "" : `step ${step}${steps ? ` of ${steps}` : ""}`].filter(Boolean).join(", ");
    words.append(more);
    label.append(box, words);
    nav.append(label);
    return box;
  });
  const show = () => {
    const chosen = boxes.filter((box) => box.checked).map((box) => `run=${encodeURIComponent(box.value)}`);
    if (chosen.length) frame.src = `./page?${chosen.join("&")}`;
  };
  boxes.forEach((box) => box.addEventListener("change", show));
  show();
}
