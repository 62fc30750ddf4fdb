"""Charts as SVG, and words for numbers; no subject of its own."""
