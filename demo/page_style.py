"""The page's own CSS, and what stands in its head."""

from __future__ import annotations

from trimode_vlm.demo import panels
from trimode_vlm.demo.chat_logic import JOINER

CSS = (
    panels.CSS
    + """
.gradio-container { max-width: 1280px !important; margin: 0 auto; }
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
  .gradio-container { padding: .5rem !important; }
  .tm-buttons button { min-height: 2.75rem; }
}
button:focus-visible, input:focus-visible, a:focus-visible, [tabindex]:focus-visible {
  outline: 2px solid var(--primary-500) !important;
  outline-offset: 1px; }
"""
)
# The policy has the browser itself refuse what would come from elsewhere, such as a picture in an answer's Markdown.
# The script takes `as_shown`'s joiners out of what is copied.
HEAD = """
<meta http-equiv="Content-Security-Policy" content="img-src 'self' data: blob:; font-src 'self' data:;
  media-src 'self' data: blob:; connect-src 'self' data: blob:; frame-src 'none'; object-src 'none'">
<script>
(() => {
  const plain = (text) => text.replaceAll("JOINER", "");
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
