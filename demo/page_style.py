"""The CSS of the page and its panels, and what stands in its head."""

from __future__ import annotations

from trimode_vlm.demo.chat_logic import JOINER

# Gradio splits selectors at every comma, those in :is() and :has() too.
CSS = """
.tm-stats { display: grid; grid-template-columns: repeat(auto-fill, minmax(7.5rem, 1fr)); gap: .5rem; margin: 0; }
.tm-stats div { border: 1px solid var(--border-color-primary); border-radius: .5rem; padding: .35rem .6rem; }
.tm-stats dt { font-size: .75rem; color: color-mix(in srgb, var(--body-text-color) 68%, transparent); }
.tm-stats dd { margin: 0; font-size: 1.05rem; font-variant-numeric: tabular-nums; }
.tm-canvas { margin-top: .75rem; font-family: var(--font-mono); font-size: .82rem; line-height: 1.7;
  white-space: pre-wrap;
  overflow-wrap: anywhere; border: 1px solid var(--border-color-primary); border-radius: .5rem; padding: .5rem .6rem;
  max-height: 16rem; overflow-y: auto; }
.tm-canvas span { border-radius: .2rem; padding: .05rem 0; }
.tm-mask { color: color-mix(in srgb, var(--body-text-color) 68%, transparent); }
.tm-new { background: rgba(56, 132, 255, .28); }
.tm-yes { background: rgba(34, 160, 84, .30); }
.tm-no { background: rgba(214, 60, 60, .25); text-decoration: line-through; }
.tm-end { color: color-mix(in srgb, var(--body-text-color) 68%, transparent); font-size: .7rem; }
.tm-legend { font-size: .75rem; color: color-mix(in srgb, var(--body-text-color) 68%, transparent); margin: .3rem 0 0; }
.tm-legend b { font-weight: 500; padding: 0 .3rem; border-radius: .2rem; }
.tm-scroll { overflow-x: auto; contain: inline-size; }
.tm-scroll tr { border: 0 !important; }
.tm-scroll table.tm-table { border-collapse: collapse; font-size: .74rem; font-variant-numeric: tabular-nums;
  width: 100%; margin: .6rem 0 0; border: 0 !important; color: var(--body-text-color); }
.tm-scroll table.tm-table th, .tm-scroll table.tm-table td { text-align: right; padding: .3rem .25rem;
  white-space: nowrap;
  border: 0 !important; border-bottom: 1px solid var(--border-color-primary) !important; }
.tm-scroll table.tm-table th { font-weight: 500; color: color-mix(in srgb, var(--body-text-color) 68%, transparent); }
.tm-scroll table.tm-table :first-child, .tm-scroll table.tm-table .tm-word { text-align: left; }
.tm-same { color: #1b7f43; } .tm-other { color: #b93c2e; }
.dark .tm-same { color: #5fd08d; } .dark .tm-other { color: #ff8d80; }
.tm-bars { margin: .75rem 0 0; font-size: .78rem; font-variant-numeric: tabular-nums; }
.tm-bars h4 { font-size: .78rem; font-weight: 500; margin: .6rem 0 .2rem; color: var(--body-text-color); }
.tm-bars div { display: grid; grid-template-columns: 6.8rem 1fr 3.2rem; gap: .5rem; align-items: center; }
.tm-bars u { position: relative; }
.tm-bars u::after { content: ""; position: absolute; left: calc(var(--one) - 1px); top: -.15rem; bottom: -.15rem;
  border-left: 1px dashed var(--body-text-color); }
.tm-bars i { display: block; height: .8rem; border-radius: 0 .2rem .2rem 0; min-width: 2px; }
.tm-bars b { font-weight: 500; text-align: right; }
.tm-auto { background: #8a63d2; } .tm-ar { background: #7d8794; } .tm-diffusion { background: #d9822b; }
.tm-linear_spec { background: #2f7ed8; } .tm-quadratic_spec { background: #2a9d6f; }
#title h1 { font-size: 1.7rem; font-weight: 700; margin: 0 0 .4rem; }
#title h1 code { font-size: 1.1rem; font-weight: 400; background: none; border: 0; }
#title .tm-hint { margin-top: .3rem; font-size: .9rem; }
.tm-note { color: #9a4a00; font-size: .9rem; overflow-wrap: anywhere; padding: .1rem .2rem; }
.dark .tm-note { color: #ffb870; }
html { overflow-y: scroll; }
.gradio-container { width: 100% !important; max-width: 1280px !important; margin: 0 auto; }
.gradio-container { --input-placeholder-color: color-mix(in srgb, var(--body-text-color) 68%, transparent);
  --block-info-text-color: color-mix(in srgb, var(--body-text-color) 68%, transparent);
  --body-text-color-subdued: color-mix(in srgb, var(--body-text-color) 68%, transparent); }
.gradio-container button[role="tab"].selected { color: var(--primary-600); }
.dark .gradio-container button[role="tab"].selected, .dark.gradio-container button[role="tab"].selected {
  color: var(--primary-400); }
.gradio-container footer, .gradio-container footer button, .gradio-container footer a {
  color: color-mix(in srgb, var(--body-text-color) 68%, transparent) !important; }
.gradio-container footer .divider { display: none; }
.tm-chat .message table { display: block; width: max-content; max-width: 100%; overflow-x: auto; border: 0; }
.tm-chat .message table th, .tm-chat .message table td { word-break: normal; overflow-wrap: normal; }
.tm-chat img { max-height: 9rem; width: auto !important; max-width: 100%; object-fit: contain; }
.tm-chat .message-markdown-disabled .md { white-space: pre-wrap; overflow-wrap: anywhere; }
.tm-chat button[aria-label="Share"] { display: none; }
.tm-noted { padding: 0 !important; min-height: 0 !important; }
.tm-noted:not(:has(p)):not(:has(table)) { display: none; }
.tm-examples .gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: .5rem; }
.tm-examples .gallery-item { width: 100%; min-height: 2.75rem; text-align: left; font-size: .85rem; }
.tm-examples .gallery-item .container { display: flex; align-items: center; justify-content: space-between; gap: .5rem;
  width: 100%; }
.tm-examples .gallery-item p { margin: 0; white-space: normal; }
.tm-examples .gallery-item img { height: 2.75rem !important; width: auto !important; max-width: 5rem;
  object-fit: contain; margin: 0; }
@media (max-width: 640px) {
  .gradio-container .main.fillable { padding: .75rem !important; }
  #session .html-container { padding: 0; }
  #session .tm-wide { display: none; }
  .tm-examples .gallery { display: flex; flex-wrap: nowrap; overflow-x: auto; }
  .tm-examples .gallery-item { flex: 0 0 16rem; }
  .tm-buttons button { min-height: 2.75rem; }
}
button:focus-visible, input:focus-visible, a:focus-visible, [tabindex]:focus-visible {
  outline: 2px solid var(--primary-500) !important;
  outline-offset: 1px; }
"""
# The policy has the browser itself refuse what would come from elsewhere, such as a picture in an answer's Markdown.
# The script takes `as_shown`'s joiners and MARK's line out of what is copied.
HEAD = """
<meta http-equiv="Content-Security-Policy" content="img-src 'self' data: blob:; font-src 'self' data:;
  media-src 'self' data: blob:; connect-src 'self' data: blob:; frame-src 'none'; object-src 'none'">
<script>
(() => {
  const plain = (text) => text.replace(/\\s*JOINERJOINER…[^\\n]*/g, "").replaceAll("JOINER", "");
  const clipboard = navigator.clipboard;
  if (clipboard) {
    const write = clipboard.writeText.bind(clipboard);
    clipboard.writeText = (text) => write(plain(text));
  }
  document.addEventListener("copy", (event) => {
    const text = String(window.getSelection());
    if (text.includes("JOINER")) {
      event.clipboardData.setData("text/plain", plain(text));
      event.preventDefault();
    }
  });
})();
</script>
""".replace("JOINER", f"\\u{ord(JOINER):04x}")
