"""Edit conversations before they are rendered: canonicalization, context editing, truncation."""
